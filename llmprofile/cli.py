"""The command line: thin over the functions that a notebook calls."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
from collections.abc import Callable, Sequence
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


# a flag, the argument of `run_load` that it sets (or what `_made` makes one of), and what argparse is told of it;
# what is not typed is left to run_load
_OPTIONS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("--model", "model", {"metavar": "M", "help": "the first that the server lists, by default"}),
    ("--requests", "n", {"type": int, "metavar": "N", "help": "how many requests (conversations)"}),
    ("--duration", "duration_s", {"type": float, "metavar": "S", "help": "for how many seconds requests fall due"}),
    ("--prompt-tokens", "prompt_tokens", {"type": int, "metavar": "P", "help": "128; a trace brings its own"}),
    ("--output-tokens", "output_tokens", {"type": int, "metavar": "T", "help": "64; a trace brings its own"}),
    ("--prompts", "prompts", {"metavar": "FILE", "help": "JSON lines with prompt or messages, and output_tokens"}),
    ("--shared-prefix", "shared_prefix", {"metavar": "GROUPS:TOKENS", "help": "prompts that begin alike, by groups"}),
    ("--system-prompt", "system_prompt", {"metavar": "TEXT", "help": "before what each request says"}),
    ("--turns", "turns", {"type": int, "metavar": "N", "help": "conversations of so many turns"}),
    ("--think", "think_s", {"type": float, "metavar": "S", "help": "between the turns of a conversation"}),
    ("--ignore-eos", "ignore_eos", {"action": "store_true", "help": "have each answer as long as asked"}),
    ("--temperature", "temperature", {"type": float, "metavar": "X", "help": "the server's own by default"}),
    ("--sampling-seed", "sampling_seed", {"type": int, "metavar": "N", "help": "the request's seed"}),
    ("--extra-body", "extra_body", {"metavar": "JSON", "help": "an object: more fields of the request's body"}),
    ("--processes", "processes", {"type": int, "metavar": "K", "help": "worker processes (1)"}),
    ("--seed", "seed", {"type": int, "metavar": "S", "help": "of the schedule; drawn and recorded by default"}),
    ("--salt", "salt", {"type": int, "metavar": "S", "help": "of the prompts' words; likewise"}),
    ("--client", "client", {"choices": ("stamped", "conventional"), "help": "(stamped)"}),
    ("--header", "headers", {"action": "append", "metavar": "'K: V'", "help": "may be given several times"}),
    ("--proxy", "proxy", {"metavar": "URL", "help": "http://host:port, or 'environment'; none by default"}),
    ("--api-key-env", "api_key_env", {"metavar": "NAME", "help": "environment variable that holds the key"}),
    ("--timeout", "timeout_s", {"type": float, "metavar": "S", "help": "of a whole request (600)"}),
    ("--first-token-timeout", "first_token_timeout_s", {"type": float, "metavar": "S", "help": "(none)"}),
    ("--connect-timeout", "connect_timeout_s", {"type": float, "metavar": "S", "help": "(30)"}),
    ("--ca-file", "ca_file", {"metavar": "F", "help": "certificates to trust instead of the system's"}),
    ("--insecure", "verify", {"action": "store_false", "help": "trust any certificate"}),
    ("--no-stream", "stream", {"action": "store_false", "help": "ask for whole answers"}),
    ("--no-usage", "usage", {"action": "store_false", "help": "do not ask for the server's token counts"}),
    ("--fresh", "fresh", {"action": "store_true", "help": "a new connection for every request"}),
    ("--warm-connections", "warm_connections", {"type": int, "metavar": "N", "help": "opened before the start"}),
    ("--scrape-metrics", "scrape_metrics", {"metavar": "URL", "help": "the server's Prometheus page, read meanwhile"}),
    ("--keep-text", "keep_text", {"action": "store_true", "help": "keep prompts and answers in the run folder"}),
    ("--out", "out", {"type": Path, "metavar": "DIR", "help": "the run folder; it must not exist"}),
)


def _add_run(run: argparse.ArgumentParser) -> None:
    run.set_defaults(command=_run)
    add = run.add_argument
    add("url", nargs="+", metavar="URL", help="with its path: .../v1/chat/completions; of several, dealt in turn")
    add("--rate", type=float, metavar="R", help="requests per second")
    add(
        "--stages",
        metavar="R:S,...",
        help="rates for so many seconds each; R..R is a ramp: 10:30,10..80:60,80:30",
    )
    add("--trace", type=Path, metavar="FILE", help="arrivals and lengths: Azure's .csv, Mooncake's .jsonl, .parquet")
    add("--speed-up", type=float, metavar="X", help="of a trace: how many times faster than it was")
    add("--concurrency", type=int, metavar="C", help="alone: users of a closed loop; beside those: cap in flight")
    add("--arrivals", choices=("poisson", "constant", "gamma"), help="law of the arrivals at a rate (poisson)")
    add("--burstiness", type=float, metavar="B", help="shape of gamma arrivals: CV = 1/sqrt(B)")
    for flag, name, told in _OPTIONS:
        add(flag, dest=name, default=argparse.SUPPRESS, **told)
    add("--json", action="store_true", help="print run.json instead of the table")
    add("--quiet", action="store_true", help="no progress, no table")


def _run(args: argparse.Namespace) -> int:
    options = {name: getattr(args, name) for _, name, _ in _OPTIONS if hasattr(args, name)}
    arrivals = _arrivals(args)
    if not isinstance(arrivals, llmprofile.ClosedLoop):
        options["max_in_flight"] = args.concurrency
    url = args.url[0] if len(args.url) == 1 else args.url
    run = llmprofile.run_load(url, arrivals, **_made(options), progress=not args.quiet)
    _print_run(run, args)
    if run.meta["ended"] != "complete":
        return ENDED_EARLY
    return DONE if run.meta["outcomes"].get("ok") else NONE_SUCCEEDED


def _made(options: dict[str, Any]) -> dict[str, Any]:
    """What was typed as the objects that `run_load` takes."""
    turns, think_s, prefix = (options.pop(name, None) for name in ("turns", "think_s", "shared_prefix"))
    if turns is not None:
        options["conversation"] = llmprofile.Conversation(turns, 0.0 if think_s is None else think_s)
    elif think_s is not None:
        raise UsageError("--think goes with --turns")
    if prefix is not None:
        if "prompts" in options:
            raise UsageError("give --prompts or --shared-prefix, not both")
        options["prompts"] = _shared_prefix(prefix)
    elif "prompts" in options:
        options["prompts"] = llmprofile.PromptFile(options["prompts"])
    if "extra_body" in options:
        options["extra_body"] = _object("--extra-body", options["extra_body"])
    return options


def _shared_prefix(word: str) -> Any:
    try:
        groups, tokens = map(int, word.split(":"))
    except ValueError:
        raise UsageError(f"--shared-prefix must be GROUPS:TOKENS, such as 8:1000; not {word!r}") from None
    return llmprofile.SharedPrefix(groups, tokens)


def _object(flag: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{flag} must be a JSON object: {error}") from None
    if not isinstance(found, dict):
        raise UsageError(f"{flag} must be a JSON object; not {text[:80]!r}")
    return found


def _print_run(run: Any, args: argparse.Namespace) -> None:
    if args.json:
        print(json.dumps({"folder": str(run.folder), **run.meta}, indent=1))
    elif not args.quiet:
        print(run)
        for error, n in run.requests["error"].dropna().value_counts().head(5).items():
            print(f"{n} x {error}")
        print(f"run folder: {run.folder}")


def _arrivals(args: argparse.Namespace) -> Any:
    given = [f"--{name}" for name in ("rate", "stages", "trace") if getattr(args, name) is not None]
    if len(given) > 1:
        raise UsageError(f"give one of --rate, --stages and --trace; not {' and '.join(given)}")
    if args.speed_up is not None and args.trace is None:
        raise UsageError("--speed-up goes with --trace")
    if args.arrivals is not None and args.rate is None and args.stages is None:
        raise UsageError("--arrivals goes with --rate or --stages: traces and closed loops have their own")
    law = _law(args)
    if args.trace is not None:
        return llmprofile.Trace(args.trace, 1.0 if args.speed_up is None else args.speed_up)
    if args.stages is not None:
        return llmprofile.Stages([_stage(word, law) for word in args.stages.split(",")])
    if args.rate is not None:
        return law(args.rate)
    if args.concurrency is None:
        raise UsageError("give --rate, --stages or --trace for an open loop, --concurrency for a closed loop or a cap")
    return llmprofile.ClosedLoop(args.concurrency)


def _law(args: argparse.Namespace) -> Callable[[float], Any]:
    """From a rate to a law of arrivals."""
    if (args.burstiness is None) == (args.arrivals == "gamma"):
        raise UsageError("--arrivals gamma needs --burstiness, and --burstiness goes with --arrivals gamma")
    if args.arrivals == "gamma":
        return lambda rate_per_s: llmprofile.Gamma(rate_per_s, args.burstiness)
    return llmprofile.Constant if args.arrivals == "constant" else llmprofile.Poisson


def _stage(word: str, law: Callable[[float], Any]) -> tuple[Any, float]:
    rates, _, seconds = word.partition(":")
    try:
        first, *last = map(float, rates.split("..", 1))
        duration_s = float(seconds)
    except ValueError:
        raise UsageError(
            f"a stage must be RATE:SECONDS or RATE..RATE:SECONDS, such as 10..80:60; not {word!r}"
        ) from None
    return (llmprofile.Ramp(first, last[0], duration_s) if last else law(first)), duration_s


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
