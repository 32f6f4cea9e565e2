"""Estimates for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from luthier.report.progress import amount

GIB = 2**30


def lines(result: Mapping[str, Any]) -> list[str]:
    """What `estimate` or `find_layouts` returned."""
    text = _about(result)
    if "layouts" in result:
        return text + _ranked(result)
    memory = {name: count for name, count in result["memory"].items() if count or name != "beside"}
    if "layout" in result:
        where = f" of {result['cluster']}" if "cluster" in result else ""
        text.append(f"layout              {result['layout']}, {result['ranks']:,} ranks{where}, ")
        text[-1] += f"{result['microbatches']} microbatches a step"
    text += [f"memory, {name:<12} {amount(count, 'B'):>10}" for name, count in memory.items()]
    if "fits" in result:
        verdict = "fits" if result["fits"] else "does not fit"
        text.append(f"memory, of a GPU    {amount(result['memory_limit'], 'B'):>10}: {verdict}")
    if "traffic" in result:
        text += _sent(result["traffic"])
    if "time" in result:
        total = result["time"]["total"]
        text += [
            f"time, {name:<14} {seconds * 1e3:>10,.1f} ms  {seconds / total:>6.1%}"
            for name, seconds in result["time"].items()
            if seconds
        ]
        text.append(f"tokens a second     {result['tokens_per_second']:,.0f}, MFU {result['mfu']:.1%}")
    return text


def _about(result: Mapping[str, Any]) -> list[str]:
    parameters, flops = result["parameters"], result["flops"]
    share = parameters["trainable"] / parameters["total"]
    text = [
        f"{result['model']}: {result['architecture']}, {parameters['total']:,} parameters, "
        f"{parameters['trainable']:,} trainable ({share:.2%}), {result['precision']}",
        *([result["adapter"]] if result["adapter"] else []),
        f"operations a token   {amount(flops['token_forward'], 'FLOP')} forward, "
        f"{amount(flops['token_backward'], 'FLOP')} backward, in rows of {result['sequence_length']:,} tokens",
    ]
    beside = flops["token_beside"]
    if beside:
        text.append(f"beside them          {amount(beside, 'FLOP')} a token, forward")
    text += [f"{result['method']['name']:<20} {note}" for note in result["method"]["notes"]]
    if "layouts" in result:
        return text
    text.append(f"operations a step    {amount(flops['step'], 'FLOP')}")
    if flops["run"] is not None:
        text.append(f"operations in all    {amount(flops['run'], 'FLOP')}")
    return text


def _sent(traffic: Mapping[str, Any]) -> list[str]:
    text = [f"sent, in all         {amount(traffic['sent'], 'B')} a step by the busiest rank"]
    if traffic["links"] is not None:
        near, far = traffic["links"]["node"], traffic["links"]["network"]
        text[-1] += f": {amount(near, 'B')} within its node, {amount(far, 'B')} to others"
    text += [
        f"sent, {flow['axis']:<12} {amount(flow['sent'], 'B'):>10}  {flow['kind']}: {flow['what']}, {flow['phase']}, "
        f"{flow['calls']:,} calls"
        for flow in traffic["flows"]
    ]
    return text


_TERMS = {
    "products": "prod",
    "other": "other",
    "weights": "fsdp",
    "tensor": "tp",
    "context": "cp",
    "experts": "ep",
    "pipeline": "pp",
    "bubble": "idle",
    "optimizer": "opt",
}
_PARTS = {
    "weights": "wgt",
    "transient": "tmp",
    "gradients": "grad",
    "optimizer": "opt",
    "activations": "act",
    "logits": "head",
    "beside": "bsd",
}


def _ranked(result: Mapping[str, Any]) -> list[str]:
    """A table: the fastest first, memory in GiB and time in ms by their terms."""
    entries = result["layouts"]
    terms = [name for name in _TERMS if any(entry["time"][name] > 5e-5 for entry in entries)]
    parts = [name for name in _PARTS if name != "beside" or any(entry["memory"][name] for entry in entries)]
    head = ["layout", "rows", "mb", "recompute", "MFU", "tokens/s", "GiB", *(_PARTS[name] for name in parts), "ms"]
    rows = [[*head, *(_TERMS[name] for name in terms), "GB in node", "GB out"]]
    for entry in entries:
        memory, time, links = entry["memory"], entry["time"], entry["traffic"]
        rows.append(
            [
                entry["layout"],
                str(entry["rows"]),
                str(entry["microbatches"]),
                entry["activation_checkpointing"],
                f"{entry['mfu']:.1%}",
                f"{entry['tokens_per_second']:,.0f}",
                f"{memory['total'] / GIB:.1f}",
                *(f"{memory[name] / GIB:.1f}" for name in parts),
                f"{time['total'] * 1e3:,.0f}",
                *(f"{time[name] * 1e3:,.0f}" for name in terms),
                f"{links['node'] / 1e9:.1f}",
                f"{links['network'] / 1e9:.1f}",
            ]
        )
    count, length = result["gpus"], result["sequence_length"]
    gpus = f"{count:,} GPU" + ("" if count == 1 else "s")
    return [
        f"{gpus} of {result['cluster']}, steps of {result['step_tokens']:,} tokens in documents of {length:,}; rows = "
        "documents in a microbatch, mb = microbatches of a data rank, memory in GiB of the fullest rank, time in ms",
        *_aligned(rows),
    ]


def _aligned(rows: Iterable[list[str]]) -> list[str]:
    rows = list(rows)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    left = {0, 3}
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
