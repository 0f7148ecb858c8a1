"""Measure an engine that runs, and hold the run against what the engine says of itself.

    python tests/engines/record_engine.py URL OUT [--rate R] [-n N] [--words W] [--tokens T] [--fresh] [--extra JSON]

URL is that of completions or chat completions; the engine's metrics page and its /tokenize are asked as well. OUT is a
new run folder. What else the engine said goes there as `engine.json`: `before` and `after` the run the counters of its
metrics page, and `tokens` of each prompt as /tokenize counts them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pandas as pd

import llmprofile as lp
from llmprofile.scrape import fetch, metrics_target, parse_metrics

WARM_UP = 8
BODY = {"ignore_eos": True, "temperature": 1.0}


def page(base_url: str) -> dict[str, float]:
    """Sums and counts of the metrics page, over all labels."""
    samples = pd.DataFrame(parse_metrics(fetch(metrics_target(base_url))))
    known = samples[samples["name"].str.match(r"vllm:.*(_sum|_count)$|vllm:.*_tokens_total$|llamacpp:.*_total$")]
    return known.groupby("name")["value"].sum().to_dict()


def tokens_of(base_url: str, model: str, prompt: str) -> int:
    """By the engine's tokenizer; llama.cpp reads `content` and `add_special`, vLLM `model` and `prompt`."""
    body = json.dumps({"model": model, "prompt": prompt, "content": prompt, "add_special": True}).encode()
    request = urllib.request.Request(f"{base_url}/tokenize", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return len(json.load(answer)["tokens"])


def measure(asked: argparse.Namespace) -> lp.Run:
    """A warm-up, the run, and what the engine says before and after it."""
    parts = urlsplit(asked.url)
    base_url = f"{parts.scheme}://{parts.netloc}"
    load: dict[str, Any] = {"prompt_tokens": asked.words, "output_tokens": asked.tokens, "progress": False, "seed": 1}
    load |= {"fresh": asked.fresh, "extra_body": BODY | asked.extra}
    with tempfile.TemporaryDirectory() as folder:
        lp.run_load(asked.url, lp.ClosedLoop(WARM_UP), WARM_UP, out=Path(folder) / "run", **load)
    before = page(base_url)
    law = lp.Poisson(asked.rate) if asked.rate else lp.ClosedLoop(1)
    run = lp.run_load(asked.url, law, asked.n, out=asked.out, scrape_metrics=base_url, keep_text=True, **load)
    said: dict[str, Any] = {"before": before, "after": page(base_url)}
    model, prompts = run.meta["asked"]["model"], pd.read_parquet(asked.out / "texts.parquet")["prompt"]
    said["tokens"] = [tokens_of(base_url, model, prompt) for prompt in prompts]
    (asked.out / "engine.json").write_text(json.dumps(said) + "\n")
    return run


def quantiles(name: str, values: Any) -> dict[str, float]:
    """Least, median, mean, p99 and largest of some times, s."""
    found = {"min": np.min, "p50": np.median, "mean": np.mean, "p99": lambda v: np.quantile(v, 0.99), "max": np.max}
    return {f"{name} {of}": float(figure(values)) for of, figure in found.items()}


def figures(run: lp.Run) -> dict[str, float]:
    """What wire and engine say of the same requests; times in seconds.

    `head_s`: from the request to the head of its answer. `rest_s`: what of TTFT is neither that nor the engine's own.
    """
    assert run.folder is not None
    said = json.loads((run.folder / "engine.json").read_text())
    between = {name: value - said["before"].get(name, 0.0) for name, value in said["after"].items()}
    times = lp.timing_differences(run)
    times["head_s"] = (run.requests["headers_ns"] - run.requests["sent_ns"]).to_numpy(float) / 1e9
    times["rest_s"] = times["outside_s"] - times["head_s"]
    found = {"requests": len(run.requests), "ok": run.meta["outcomes"].get("ok", 0), "timed": len(times)}
    found |= {"mismatches": len(lp.token_mismatches(run)), "resent": run.meta["resent"]}
    for name in ("ttft_s", "server_ttft_s", "outside_s", "head_s", "rest_s", "generation_difference_s"):
        found |= quantiles(name, times[name])
    for name in ("time_to_first_token_seconds", "request_queue_time_seconds", "request_prefill_time_seconds"):
        if count := between.get(f"vllm:{name}_count"):
            found[f"vllm:{name} mean"] = between[f"vllm:{name}_sum"] / count
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("url")
    parser.add_argument("out", type=Path)
    parser.add_argument("--rate", type=float, help="Poisson arrivals, requests per second; else one after the other")
    parser.add_argument("-n", type=int, default=100, help="requests")
    parser.add_argument("--words", type=int, default=32, help="of a prompt")
    parser.add_argument("--tokens", type=int, default=32, help="of an answer")
    parser.add_argument("--fresh", action="store_true", help="a connection for each request")
    parser.add_argument("--extra", type=json.loads, default={}, help="more fields of the request, as JSON")
    run = measure(parser.parse_args())
    print(run)
    for name, value in figures(run).items():
        print(f"{name:45} {value:.6f}" if isinstance(value, float) else f"{name:45} {value}")


if __name__ == "__main__":
    main()
