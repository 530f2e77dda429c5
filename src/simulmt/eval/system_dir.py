"""What makes a bundle's directory a SimulEval `--system-dir`.

SimulEval takes an agent's options from a file in that directory, not from its command line, so that there is one
for every delay: `--system-config k3.yaml`. Without that option it reads main.yaml, which is the model's own delay.
"""

from __future__ import annotations

from pathlib import Path

from simulmt.runtime.bundle import Bundle

AGENT = "simulmt.eval.agents.BundleAgent"


def write_system_configs(directory: Path) -> list[Path]:
    """Put main.yaml, and k<delay>.yaml for each delay, into a bundle's directory; the files written."""
    configs = {"main": ""} | {f"k{delay}": f"delay: {delay}\n" for delay in Bundle(directory).config.delays}
    paths = []
    for name, delay in configs.items():
        paths.append(directory / f"{name}.yaml")
        # SimulEval starts the agent inside the directory, so the bundle is where it stands.
        paths[-1].write_text(f"agent_class: {AGENT}\nmodel: .\n{delay}", encoding="utf-8")
    return paths
