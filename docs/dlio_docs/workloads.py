"""Tables of storage workloads: shapes, keys of DLIO, and rounds of MLPerf Storage."""

from dlio_bench.storage_cases.dlio_keys import effects, read_job, shape_names
from dlio_bench.storage_cases.rules import VERSIONS

__all__ = ["keys_table", "rounds_table", "shapes_table"]


def shapes_table() -> str:
    """Return a row for each workload that dlio brings."""
    rows = [
        "| workload | format | files x samples | bytes of a sample | batch | step | least AU |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in shape_names():
        w = read_job(name).workload
        size = f"{w.sample_bytes:,.0f}"
        if w.sample_bytes_stdev:
            size += f" ± {w.sample_bytes_stdev:,.0f}"
        rows.append(
            f"| `{name}` | {w.format} | {w.files:,} x {w.samples_per_file:,} | {size} "
            f"| {w.batch_size:,} | {w.step_s * 1e3:g} ms | {w.least_au:.0%} |"
        )
    return "\n".join(rows)


def keys_table() -> str:
    """Return the keys by their effects."""
    rows = ["| effect | keys |", "|---|---|"]
    for effect, keys in effects().items():
        rows.append(f"| {effect} | {', '.join(f'`{key}`' for key in keys)} |")
    return "\n".join(rows)


def rounds_table() -> str:
    """Return the least accelerator utilisation in each round of MLPerf Storage."""
    rows = ["| round | accelerators | least accelerator utilisation |", "|---|---|---|"]
    for version, rules in VERSIONS.items():
        least = ", ".join(f"{name} {share:.0%}" for name, share in rules.least_au.items())
        rows.append(f"| {version} | {', '.join(rules.accelerators)} | {least} |")
    return "\n".join(rows)
