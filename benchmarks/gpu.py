"""Training on an NVIDIA GPU: ``python -m benchmarks.gpu [--case gpt_medium]``.

A GPT-2 of 24 layers of width 1024 and sequences of 1024 in bfloat16, and the tiny MLP, a GPT of 10 million parameters
and a ResNet-18, each trained by the compiled plain loop, by our APIs, eager and in graph mode, and by the installed
peers. It reports milliseconds per step, the ratio to the compiled plain loop of the same round, model FLOP utilization
(MFU), host launches per step, and peak memory of the GPU. Between two log lines no step of ours may synchronize with
the GPU: ``torch.cuda.set_sync_debug_mode("error")`` ends a training that does.

``python -m benchmarks.checkpoint --device cuda`` measures saves on a GPU. ``--device cpu`` tests this program.
"""

import os
import sys
from typing import Any

from benchmarks.rounds import installed_peers, parser_of, print_table, run, write

# Dense bfloat16 peak, TFLOP/s, from NVIDIA's data sheets. Keys are parts of torch's device names.
PEAK_TFLOPS = {"H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H200": 989, "GH200": 989, "B200": 2250, "A100": 312}
CASES: dict[str, dict[str, Any]] = {
    "gpt_medium": {"model": "gpt_medium", "steps": 120, "batch": 16, "precision": "bf16"},
    "gpt": {"model": "gpt", "steps": 600, "batch": 8, "precision": "bf16"},
    "tiny": {"model": "mlp", "steps": 3000},
    "resnet": {"model": "resnet", "steps": 400, "batch": 128, "precision": "bf16"},
}
BASE = "plain:compile"
OURS = ("objects", "objects:graph", "config", "config:graph")
OTHERS = {"transformers": "transformers:compile", "lightning": "lightning:compile", "accelerate": "accelerate"}
COLUMNS = {
    "ms": ("ms a step", 2),
    "mfu": ("MFU %", 1),
    "launches": ("host launches a step", 0),
    "gpu_mib": ("GPU MiB", 0),
    "peak_mib": ("host MiB", 0),
}


def main() -> None:
    parser = parser_of(__doc__, rounds=3)
    parser.add_argument("--case", choices=CASES, action="append", help="default: all; may be repeated")
    parser.add_argument("--peers", help="separated by commas")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--peak-tflops", type=float, help="peak of the GPU in bfloat16, if its name is not known")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    name = device_name(args.device)
    peak = args.peak_tflops or next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)
    peers = args.peers.split(",") if args.peers else [BASE, "plain:fused", *OURS, *_installed()]
    everything: list[dict[str, Any]] = []
    for case in args.case or CASES:
        job = CASES[case] | {"device": args.device} | ({"steps": args.steps} if args.steps else {})
        job["log_every"] = max(2, job["steps"] // 6)
        results = measure(peers, job, args.rounds, peak)
        print(f"\n{case}: {job} on {name}, rounds: {args.rounds}")
        print_table(results, COLUMNS, ratio_of="ms", base=BASE)
        for peer in dict.fromkeys(result["name"] for result in results):
            errors = [result["sync"] for result in results if result["name"] == peer and result.get("sync")]
            if errors:
                print(f"{peer} waits for the GPU between two log lines: {errors[0][:200]}")
        everything += [result | {"case": case, "device": name} for result in results]
    write(args.json, "benchmarks.gpu", name, everything)


def device_name(device: str) -> str:
    """The name of the GPU; exits if there is none."""
    import torch

    if device == "cpu":
        return "cpu"
    if not torch.cuda.is_available():
        sys.exit("benchmarks.gpu: torch finds no CUDA GPU here; run it on a machine that has one.")
    return torch.cuda.get_device_name(device)


def measure(peers: list[str], job: dict[str, Any], rounds: int, peak_tflops: float | None) -> list[dict[str, Any]]:
    """All peers, alternating. Counts come from separate trainings, once per peer."""
    counted = {peer: _counts(peer, job) for peer in peers}
    results = []
    for number in range(rounds):
        for peer in peers:
            result = _run(peer, job) | {"round": number, **counted[peer]}
            if result.get("us_between_lines"):
                result["ms"] = result["us_between_lines"] / 1e3
                if peak_tflops and result.get("flops"):
                    result["mfu"] = 100 * result["flops"] / (result["ms"] / 1e3) / (peak_tflops * 1e12)
            results.append(result)
    return results


def _counts(peer: str, job: dict[str, Any]) -> dict[str, Any]:
    few = job | {"steps": min(job["steps"], 60), "log_every": 20}
    counts = _run(peer, few | {"counts": "launches"})
    found: dict[str, Any] = {metric: counts[metric] for metric in ("launches", "gpu_mib", "flops") if metric in counts}
    if peer.startswith(("objects", "config")) and job["device"] != "cpu":
        watched = _run(peer, few | {"counts": "syncs"})
        found["sync"] = watched.get("error", "")
    return found


def _run(peer: str, job: dict[str, Any]) -> dict[str, Any]:
    return run(peer, job, timeout_s=1800, CUDA_VISIBLE_DEVICES=os.environ.get("CUDA_VISIBLE_DEVICES", "0"))


def _installed() -> list[str]:
    return [variant for peer, variant in OTHERS.items() if peer in installed_peers()]


if __name__ == "__main__":
    main()
