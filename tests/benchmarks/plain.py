"""What everyone writes: an open-loop streaming benchmark on aiohttp, with nothing of llmprofile in it.

python plain.py URL RATE REQUESTS PROMPT_WORDS TOKENS SEED NAME: Poisson arrivals, a task a request, X-Request-Id
NAME-<number>. Prints as JSON the processor seconds of the load, and [number, begun, first token handled] in ns.
"""

import asyncio
import json
import sys
import time

import aiohttp
import numpy as np


async def send(session, url, name, number, words, tokens, rows):
    body = {"model": "m", "prompt": "hello " * words, "max_tokens": tokens, "stream": True}
    body["stream_options"] = {"include_usage": True}
    begun, times, buffer = time.monotonic_ns(), [], b""
    async with session.post(url, json=body, headers={"X-Request-Id": f"{name}-{number}"}) as response:
        response.raise_for_status()
        async for chunk in response.content.iter_any():
            buffer += chunk
            *events, buffer = buffer.split(b"\n\n")
            for event in events:
                data = event.removeprefix(b"data: ")
                if data != b"[DONE]":
                    choices = json.loads(data)["choices"]
                    if choices and choices[0]["text"]:
                        times.append(time.monotonic_ns())
    if len(times) == tokens:
        rows.append((number, begun, times[0]))


async def main(url, rate, requests, words, tokens, seed, name):
    rng = np.random.default_rng(np.random.SeedSequence(seed).spawn(1)[0])
    due, rows, tasks = np.cumsum(rng.exponential(1 / rate, requests)).tolist(), [], []
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        start, cpu = time.monotonic() + 0.1, time.process_time()
        for number in range(requests):
            await asyncio.sleep(max(0.0, start + due[number] - time.monotonic()))
            tasks.append(asyncio.create_task(send(session, url, name, number, words, tokens, rows)))
        await asyncio.gather(*tasks)
        print(json.dumps({"cpu_s": time.process_time() - cpu, "rows": rows}))


url, rate, requests, words, tokens, seed, name = sys.argv[1:]
asyncio.run(main(url, float(rate), int(requests), int(words), int(tokens), int(seed), name))
