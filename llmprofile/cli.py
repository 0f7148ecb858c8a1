"""The command line: thin over the functions that a notebook calls."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llmprofile
from llmprofile.errors import LlmprofileError, UsageError

DONE, REFUSED, NONE_SUCCEEDED, ENDED_EARLY = 0, 2, 3, 4


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; its exit status.

    Returns
    -------
    int
        0 done, 2 wrong use or refused before anything was sent, 3 no request succeeded, 4 ended early with its data
        kept.
    """
    args = _parser().parse_args(argv)
    try:
        return int(args.command(args))
    except LlmprofileError as error:
        print(f"llmprofile: {error}", file=sys.stderr)
        return REFUSED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="llmprofile", description=llmprofile.__doc__.splitlines()[0])
    parser.add_argument("--version", action="version", version=f"llmprofile {llmprofile.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run(commands.add_parser("run", help="put a load on a server and measure it"))
    show = commands.add_parser("show", help="show a run folder")
    show.add_argument("folder", type=Path, metavar="DIR")
    show.set_defaults(command=_show)
    report = commands.add_parser("report", help="write a run, or two that are compared, as one HTML file")
    report.add_argument("folder", type=Path, metavar="DIR")
    report.add_argument("other", type=Path, nargs="?", metavar="DIR", help="a second run, to compare")
    report.add_argument("--out", type=Path, metavar="FILE", help="DIR.html here by default; it must not exist")
    report.set_defaults(command=_report)
    _add_serve(commands.add_parser("serve", help="start the reference server"))
    demo = commands.add_parser("demo", help="what an ordinary client reports, beside the truth")
    demo.add_argument("--out", type=Path, metavar="DIR", help="where the runs and the figure go")
    demo.set_defaults(command=_demo)
    return parser


def _add_run(run: argparse.ArgumentParser) -> None:
    run.set_defaults(command=_run)
    add = run.add_argument
    add("url", metavar="URL", help="with its path: .../v1/completions or .../v1/chat/completions")
    add("--model", metavar="M", help="the first that the server lists, by default")
    add("--arrivals", choices=("poisson", "constant", "gamma"), help="law of the arrivals (poisson)")
    add("--burstiness", type=float, metavar="B", help="shape of gamma arrivals: CV = 1/sqrt(B)")
    add("--rate", type=float, metavar="R", help="requests per second")
    add("--concurrency", type=int, metavar="C", help="alone: users of a closed loop; with --rate: cap in flight")
    add("--requests", type=int, metavar="N", help="how many requests")
    add("--duration", type=float, metavar="S", help="for how many seconds requests fall due")
    add("--prompt-tokens", type=int, default=128, metavar="P")
    add("--output-tokens", type=int, default=64, metavar="T")
    add("--processes", type=int, default=1, metavar="K", help="worker processes (1)")
    add("--seed", type=int, metavar="S", help="of the schedule; drawn and recorded by default")
    add("--client", choices=("stamped", "conventional"), default="stamped")
    add("--header", action="append", default=[], metavar="'K: V'", help="may be given several times")
    add("--api-key-env", metavar="NAME", help="environment variable that holds the key")
    add("--timeout", type=float, default=600.0, metavar="S", help="of a whole request (600)")
    add("--ca-file", metavar="F", help="certificates to trust instead of the system's")
    add("--insecure", action="store_true", help="trust any certificate")
    add("--no-stream", action="store_true", help="ask for whole answers")
    add("--no-usage", action="store_true", help="do not ask for the server's token counts")
    add("--fresh", action="store_true", help="a new connection for every request")
    add("--json", action="store_true", help="print run.json instead of the table")
    add("--out", type=Path, metavar="DIR", help="the run folder; it must not exist")
    add("--quiet", action="store_true", help="no progress, no table")


def _run(args: argparse.Namespace) -> int:
    run = llmprofile.run_load(
        args.url,
        _arrivals(args),
        args.requests,
        duration_s=args.duration,
        prompt_tokens=args.prompt_tokens,
        output_tokens=args.output_tokens,
        processes=args.processes,
        client=args.client,
        max_in_flight=args.concurrency if args.rate is not None else None,
        model=args.model,
        seed=args.seed,
        stream=not args.no_stream,
        usage=not args.no_usage,
        headers=args.header,
        api_key_env=args.api_key_env,
        ca_file=args.ca_file,
        verify=not args.insecure,
        fresh=args.fresh,
        timeout_s=args.timeout,
        out=args.out,
        progress=not args.quiet,
    )
    _print_run(run, args)
    if run.meta["ended"] != "complete":
        return ENDED_EARLY
    return DONE if run.meta["outcomes"].get("ok") else NONE_SUCCEEDED


def _print_run(run: Any, args: argparse.Namespace) -> None:
    if args.json:
        print(json.dumps({"folder": str(run.folder), **run.meta}, indent=1))
    elif not args.quiet:
        print(run)
        for error, n in run.requests["error"].dropna().value_counts().head(5).items():
            print(f"{n} x {error}")
        print(f"run folder: {run.folder}")


def _arrivals(args: argparse.Namespace) -> Any:
    if args.burstiness is not None and args.arrivals != "gamma":
        raise UsageError("--burstiness goes with --arrivals gamma")
    if args.rate is None:
        if args.concurrency is None:
            raise UsageError("give --rate for an open loop, --concurrency for a closed one, or both for a capped one")
        if args.arrivals is not None:
            raise UsageError("--arrivals goes with --rate; a closed loop sends when an answer has come")
        return llmprofile.ClosedLoop(args.concurrency)
    if args.arrivals == "gamma":
        if args.burstiness is None:
            raise UsageError("--arrivals gamma needs --burstiness")
        return llmprofile.Gamma(args.rate, args.burstiness)
    return (llmprofile.Constant if args.arrivals == "constant" else llmprofile.Poisson)(args.rate)


def _show(args: argparse.Namespace) -> int:
    run = llmprofile.load(args.folder)
    print(run)
    if run.meta["verdict"] is None:  # it was cut short before it was judged
        print(llmprofile.verdict(run))
    return DONE


def _report(args: argparse.Namespace) -> int:
    from llmprofile.htmlreport import new_file, report

    folders = [folder for folder in (args.folder, args.other) if folder is not None]
    # before anything is loaded: that puts together what a run that was cut short left
    out = new_file(args.out or "-".join(folder.resolve().name for folder in folders) + ".html")
    print(f"report: {report([llmprofile.load(folder) for folder in folders], out)}")
    return DONE


def _add_serve(serve: argparse.ArgumentParser) -> None:
    serve.set_defaults(command=_serve)
    serve.add_argument("--port", type=int, default=8000, metavar="P", help="on 127.0.0.1 (8000)")
    serve.add_argument("--ttft", type=float, default=0.05, metavar="S", help="seconds to the first token (0.05)")
    serve.add_argument("--itl", type=float, default=0.01, metavar="S", help="seconds from token to token (0.01)")
    serve.add_argument("--step", action="store_true", help="all streams get their tokens on the same decode step")
    serve.add_argument("--max-batch", type=int, metavar="B", help="batch continuously, at most B at a time")


def _serve(args: argparse.Namespace) -> int:
    server = llmprofile.ReferenceServer(
        ttft_s=args.ttft, itl_s=args.itl, step=args.step, max_batch=args.max_batch, port=args.port
    )
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with server:
        print(f"serving {server.url} and {server.chat_url}; Ctrl-C ends it", flush=True)
        stop.wait()
    return DONE


def _demo(args: argparse.Namespace) -> int:
    from llmprofile.demo import run_demo

    demo = run_demo(args.out)
    print(demo)
    return DONE if demo.complete else ENDED_EARLY
