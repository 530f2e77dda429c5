"""Time to plan the batches of a large corpus, compared with sorting its sentences by length in plain Python.

python benchmarks/start.py [--pairs 10000000]
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from simulmt.train.batches import BatchPlan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10_000_000)
    arguments = parser.parse_args()
    random = np.random.default_rng(1)
    source = np.clip(random.gamma(2.5, 11.0, arguments.pairs), 2, 250).astype(np.int64)
    target = np.clip(source * random.uniform(0.6, 1.6, arguments.pairs), 2, 250).astype(np.int64)

    started = time.perf_counter()
    plan = BatchPlan(source, target, batch_tokens=32_768, seed=1)
    plan.rows(0)
    ours = time.perf_counter() - started
    started = time.perf_counter()
    lengths = source.tolist()
    sorted(range(len(lengths)), key=lengths.__getitem__)
    plain = time.perf_counter() - started
    print(f"{arguments.pairs:,} pairs: {plan.batches_per_epoch:,} batches, {plan.padding_share():.2%} padding")
    print(f"first batch after {ours:.2f} s; sorting Python lists {plain:.2f} s; ratio {plain / ours:.1f}")


if __name__ == "__main__":
    main()
