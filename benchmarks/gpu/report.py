"""The Markdown table of the results."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.entries import Entries, find_errors
from benchmarks.gpu.schedule import SECTIONS

BY_HAND = "by hand"


def make_table(results: Entries) -> str:
    """Returns tables of what was measured, and of what does not hold."""
    gpt: Entries = {}
    for section in SECTIONS:
        if section.module == "gpt":
            gpt |= get_dict(results.get(section.name, {}), "ways")
    mlp = turn_around(results.get("mlp", {}))
    parts = [
        describe_machine(results),
        make_summary(results),
        make_timing_table("GPT-2, 124M parameters, 8 rows of 1,024 tokens", gpt),
        make_jax_table(results.get("jax", {})),
        make_timing_table("A network of four layers, 64 rows", mlp),
        make_prefetch_table(results.get("prefetch", {})),
        make_launch_table(results),
    ]
    return "\n\n".join(part for part in parts if part)


def get_dict(entries: Any, name: str) -> Entries:
    """Returns a dict among entries; an empty one if there is none."""
    value = entries.get(name, {}) if isinstance(entries, dict) else {}
    return value if isinstance(value, dict) else {}


def turn_around(section: Entries) -> Entries:
    """Returns entries by way and number of microbatches, from those by number and way."""
    ways: Entries = {}
    for number, entries in section.items():
        if number.startswith("K=") and isinstance(entries, dict):
            for name, values in entries.items():
                ways.setdefault(name, {})[number] = values
    return ways


def describe_machine(results: Entries) -> str:
    """Returns the card and the versions in one line."""
    env = results.get("env", {})
    packages = get_dict(env, "packages")
    card = env.get("gpu", f"no card ({results.get('device')})")
    versions = f"torch {env.get('torch')}, triton {packages.get('triton')}"
    line = f"{card}, {versions}, Python {env.get('python')}, {results.get('seconds')} s in all."
    if results.get("tiny"):
        line += " Sizes are tiny: these figures mean nothing."
    return line


def make_summary(results: Entries) -> str:
    """Returns a line for each section: how it went."""
    lines = ["| section | seconds | errors | |", "|---|---|---|---|"]
    for section in SECTIONS:
        entries = results.get(section.name)
        if not isinstance(entries, dict):
            continue
        errors = find_errors(entries)
        note = entries.get("skipped", "")
        if "tests" in entries:
            note = f"{entries.get('passed')} of {entries['tests']} tests pass"
        elif errors:
            path, message = next(iter(errors.items()))
            note = f"{path}: {message}"
        text = str(note).replace("\n", " ").replace("|", "/")[:160]
        lines.append(
            f"| {section.name} | {entries.get('seconds', '')} | {len(errors)} | {text} |"
        )
    return "\n".join(lines)


def make_timing_table(title: str, ways: Entries) -> str:
    """Returns a line for each way and number of microbatches, beside the loop by hand."""
    titles = [title, "K", "ms", "of the loop by hand", "host ms", "tokens/s"]
    titles += ["MFU", "peak MiB", "of the loop"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for name, numbers in ways.items():
        for number, values in numbers.items():
            if not number.startswith("K=") or "ms" not in values:
                continue
            base = get_dict(get_dict(ways, BY_HAND), number)
            cells = [
                name,
                number.removeprefix("K="),
                f"{values['ms']:.3f}",
                divide(values, base, "ms"),
                f"{values.get('host_ms', 0):.3f}",
                str(values.get("tokens_per_s", "")),
                str(values.get("mfu", "")),
                str(values.get("peak_mib", "")),
                divide(values, base, "peak_mib"),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def divide(values: Entries, base: Entries, name: str) -> str:
    """Returns the ratio of a value to that of the loop by hand, if both are known.

    >>> divide({"ms": 3.0}, {"ms": 2.0}, "ms"), divide({"ms": 3.0}, {}, "ms")
    ('1.500', '')
    """
    if values.get(name) and base.get(name):
        return f"{values[name] / base[name]:.3f}"
    return ""


def make_jax_table(section: Entries) -> str:
    """Returns a line for each number of microbatches."""
    lines = [
        "| the same by JAX and optax | K | ms | tokens/s | peak MiB |",
        "|---|---|---|---|---|",
    ]
    for number in section:
        for name, values in get_dict(section, number).items():
            if isinstance(values, dict) and "ms" in values:
                rest = f"{values['tokens_per_s']} | {values.get('peak_mib', '')}"
                lines.append(f"| {name} | {number[2:]} | {values['ms']} | {rest} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def make_prefetch_table(section: Entries) -> str:
    """Returns a line for each way to bring data to the device."""
    lines = [
        f"| {section.get('mib_per_update')} MiB in each update | ms |",
        "|---|---|",
    ]
    for name, values in get_dict(section, "ways").items():
        if "ms" in values:
            lines.append(f"| {name} | {values['ms']:.3f} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def make_launch_table(results: Entries) -> str:
    """Returns launches of an update in several settings, and where the host waits."""
    section = results.get("waits", {})
    steps = get_dict(section, "steps")
    loop = (
        {"the loop by hand": section.get("by hand", {})}
        if isinstance(section, dict)
        else {}
    )
    counted = {
        name: values
        for name, values in {**steps, **loop}.items()
        if "launches" in values
    }
    lines = [
        "| a small network, two microbatches | launches | kernels | waits |",
        "|---|---|---|---|",
    ]
    for name, values in counted.items():
        counts = values["launches"]
        cells = [
            counts["launches"],
            counts.get("kernels", ""),
            len(values.get("waits", [])),
        ]
        lines.append(f"| {name} | {' | '.join(str(cell) for cell in cells)} |")
    for name, counts in get_dict(section, "transition").items():
        if isinstance(counts, dict) and "launches" in counts:
            title = f"clipped adamw alone, {name}, {counts.get('leaves')} leaves"
            cells = [counts["launches"], counts.get("kernels", ""), ""]
            lines.append(f"| {title} | {' | '.join(str(cell) for cell in cells)} |")
    waiting = [name for name, values in steps.items() if values.get("waits")]
    if len(lines) == 2:
        return ""
    settings = ", ".join(waiting) or "none"
    ranges = sorted(
        {name for values in counted.values() for name in values["launches"]["ranges"]}
    )
    lines += ["", f"Ranges that torch.profiler shows: {', '.join(ranges) or 'none'}."]
    return "\n".join(
        [*lines, "", f"{len(steps)} settings; the host waits in: {settings}."]
    )
