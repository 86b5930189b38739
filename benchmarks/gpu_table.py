# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""What `make gpu` has found, as Markdown."""

from typing import Any

from .twin import DECODE_STEPS, TWIN


Results = dict[str, Any]


def table(results: Results) -> str:
    """The content of a `gpu.json`: a table for each kind of part, one of what has no result, and what was measured."""
    kinds: dict[str, Results] = {"kernels": {}, "trial": {}, "times": {}, "reads": {}}
    for name, part in results["parts"].items():
        kind, _, what = name.partition(": ")
        kinds[kind][what] = part
    found = {kind: [part["result"] for part in parts.values() if "result" in part] for kind, parts in kinds.items()}
    tables = []
    if kinds["kernels"]:
        cells = [part.get("result", "fails" if "error" in part else "not tried") for part in kinds["kernels"].values()]
        tables.append(markdown(["", *kinds["kernels"]], [["kernels against their definition", *cells]]))
    for trial in found["trial"]:
        tables += tables_of_trial(trial)
    tables += table_of_times(found["times"]) + table_of_reads(found["reads"])
    without: dict[str, list[str]] = {}
    for name, part in results["parts"].items():
        if "result" not in part:
            without.setdefault(part.get("error") or part["skipped"], []).append(name)
    if without:
        tables.append(
            markdown(["without a result", "why"], [["; ".join(names), why] for why, names in without.items()])
        )
    return "\n\n".join([*tables, *results["notes"], caption(results)]) + "\n"


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table; what would end a cell or a row is left out of its cells."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(' '.join(cell.replace('|', '/').split()) for cell in line)} |" for line in lines)


def tables_of_trial(trial: Results) -> list[str]:
    """Milliseconds by dtype and backend, and what is chosen by them."""
    rows = [
        [dtype, *(f"{1e3 * cell:.2f} ms" if isinstance(cell, float) else cell for cell in by_backend.values())]
        for dtype, by_backend in trial["trial"].items()
    ]
    backends = list(next(iter(trial["trial"].values()), {}))
    tables = [markdown(["trial: reads of a block in training", *backends], rows)] if rows else []
    return [*tables, "\n".join(f"- {line}" for line in trial["described"])]


def table_of_times(found: list[Results]) -> list[str]:
    """A row for each case and one for its peak memory, a column for each backend and variant."""
    if not found:
        return []
    rows: dict[tuple, list[Results]] = {}
    for result in found:
        key = f"{result['shape']}, {result['layers']} layers", result["case"], result["mode"]
        rows.setdefault(key, []).append(result)
    columns = list(dict.fromkeys((r["backend"], t["model"]) for r in found for t in r["time"] if t["model"] != TWIN))
    times, peaks = [], []
    for (shape, case, mode), of_row in rows.items():
        time = {(result["backend"], record["model"]): record for result in of_row for record in result["time"]}
        of_twin = next(record for (_, model), record in time.items() if model == TWIN)
        steps = DECODE_STEPS if case.startswith("decode") else 1
        name, twin = f"{shape}: {case}, {mode}", f"{1e3 * of_twin['fastest_seconds'] / steps:.1f} ms"
        times.append([name, twin, *(ratio(time.get(column)) for column in columns)])
        # Not told on every CPU, or too little for the system to see
        held = {result["backend"]: result["peaks"] for result in of_row if (result["peaks"][TWIN] or 0) >= 2**20}
        if held:
            twin = f"{next(iter(held.values()))[TWIN] / 2**20:,.0f} MiB"
            shares = [held[b][model] / held[b][TWIN] if b in held else None for b, model in columns]
            peaks.append([f"{name}, peak memory", twin, *("" if s is None else f"**{s:.2f}**" for s in shares)])
    return [markdown(["", "twin", *(f"{model}, `{backend}`" for backend, model in columns)], times + peaks)]


def table_of_reads(found: list[Results]) -> list[str]:
    """A row for each size and mode: ours in milliseconds, the kernels of others as ratio to it."""
    if not found:
        return []
    peers = list(dict.fromkeys(result["peer"] for result in found))
    rows: dict[str, dict[str, Results]] = {}
    for result in found:
        for record in result["time"]:
            name = f"read of 9 sources of {result['tokens']:,} tokens x {result['hidden_size']}, {record['mode']}"
            rows.setdefault(name, {}).setdefault(record["model"], record)
    cells = [
        [name, f"{1e3 * of_row['attnres']['fastest_seconds']:.3f} ms", *(ratio(of_row.get(peer)) for peer in peers)]
        for name, of_row in rows.items()
    ]
    return [markdown(["", "attnres, `triton`", *(f"{peer} / attnres" for peer in peers)], cells)]


def ratio(record: Results | None) -> str:
    if record is None:
        return ""
    low, high = record["quartiles"]
    return f"**{record['median_ratio']:.3f}** ({low:.3f} to {high:.3f})"


def caption(results: Results) -> str:
    """What was measured, and on what."""
    of, on = results["environment"], results["machine"]
    memory = f", {of['memory'] / 2**30:.0f} GiB" if "memory" in of else ""
    versions = ", ".join(f"{name} {version or 'not installed'}" for name, version in of.items() if name != "memory")
    return (
        f"`make gpu` on {on['device']}{memory}, bf16. Ratios are to the PreNorm twin, or to ours, pair by pair: median"
        f" (quartiles); its time is the fastest, in decoding of a step. {versions}; commit {on['commit']},"
        f" {on['date']}."
    )
