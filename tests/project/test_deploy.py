"""Files for deploying and releasing name flags, metrics, verbs and files that there are."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdec_kernels.cli import make_parser
from specdec_kernels.engine import Engine
from specdec_kernels.server.metrics import Metrics
from specdec_kernels.tiny import tiny_model

ROOT = Path(__file__).resolve().parents[2]
DEPLOY, GITHUB = ROOT / "deploy", ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def parsed(arguments: list[str]) -> Any:
    """Return the flags of a `specdec` command; the parser ends the process at one that it does not know."""
    return make_parser().parse_args(arguments)


def test_every_yaml_file_of_the_repository_parses() -> None:
    files = [*DEPLOY.rglob("*.yaml"), *GITHUB.rglob("*.yml"), ROOT / "CITATION.cff"]
    assert len(files) >= 9 and all(read(file) for file in files)


def test_board_shows_metrics_that_the_server_has() -> None:
    with Engine(tiny_model("target"), device="cpu", max_len=64, num_slots=1, adaptive=False) as engine:
        text = Metrics(engine, "tiny").text().decode()
    types = dict(re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE))
    known = {name for name, kind in types.items() if kind != "histogram"}
    known |= {f"{name}_bucket" for name, kind in types.items() if kind == "histogram"}
    board = json.loads((DEPLOY / "grafana" / "specdec.json").read_text())
    shown = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    shown.append(board["templating"]["list"][0]["query"]["query"])
    names = {name for expression in shown for name in re.findall(r"\b(?:vllm|sglang|specdec):\w+", expression)}
    assert len(names) >= 14 and names <= known
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_compose_file_runs_the_image_and_mounts_files_that_exist() -> None:
    services = read(DEPLOY / "compose.yaml")["services"]
    server, prometheus, grafana = (services[name] for name in ("specdec", "prometheus", "grafana"))
    assert (DEPLOY / server["build"]["context"] / server["build"]["dockerfile"]).resolve() == DEPLOY / "Dockerfile"
    arguments = set(re.findall(r"^ARG (\w+)", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE))
    assert server["build"]["args"].keys() <= arguments
    parsed([*entry_point()[1:], *server["command"]])
    assert server["stop_grace_period"] == "30s" and parsed(entry_point()[1:]).drain_seconds < 30
    for volume in [*prometheus["volumes"], *grafana["volumes"]]:
        source = volume.split(":")[0]
        assert not source.startswith(".") or (DEPLOY / source).exists(), source
    (job,) = read(DEPLOY / "prometheus.yaml")["scrape_configs"]
    port = parsed(entry_point()[1:]).port
    assert (
        job["static_configs"] == [{"targets": [f"specdec:{port}"]}]
        and job.get("metrics_path", "/metrics") == "/metrics"
    )
    source = read(DEPLOY / "grafana" / "provisioning" / "datasources" / "prometheus.yaml")["datasources"][0]
    board = (DEPLOY / "grafana" / "specdec.json").read_text()
    assert set(re.findall(r'"type": "prometheus",\s*"uid": "(\w+)"', board)) == {source["uid"]}
    assert not read(DEPLOY / "compose.yaml")["volumes"].keys() - {"cache", "prometheus", "grafana"}


def entry_point() -> list[str]:
    (line,) = re.findall(r"^ENTRYPOINT (.*)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    words: list[str] = json.loads(line)
    return words


def test_dockerfile_builds_by_a_verb_and_serves() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    assert entry_point()[:2] == ["specdec", "serve"] and parsed(entry_point()[1:]).port == 30000
    assert "EXPOSE 30000" in text and re.search(r"^USER specdec$", text, re.MULTILINE)
    assert "./build.sh wheel ${VARIANT}" in text and "specdec-kernels[serve]" in text
    for name in re.findall(r"^COPY --from=wheel \S+ /source/(\S+) ", text, re.MULTILINE):
        assert (ROOT / name).exists()
    for arguments in re.findall(r"--build-arg (\w+)=", text):
        assert f"ARG {arguments}" in text


def test_systemd_unit_is_sound_and_its_command_is_understood(tmp_path: Path) -> None:
    unit = (DEPLOY / "specdec.service").read_text()
    (command,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    program, *arguments = shlex.split(command.replace("${MODEL}", "model"))
    args = parsed(arguments)
    assert Path(program).name == "specdec" and arguments[0] == "serve" and args.model_path == "model"
    (stop,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert args.drain_seconds + 2 <= int(stop)
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze")
    copy = tmp_path / "specdec.service"
    copy.write_text(unit.replace(program, sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True)
    assert "specdec.service" not in done.stderr, done.stderr


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=[path.stem for path in WORKFLOWS])
def test_workflow_pins_what_it_runs_and_asks_for_few_rights(workflow: Path) -> None:
    text, jobs = workflow.read_text(), read(workflow)["jobs"]
    assert read(workflow)["permissions"] == {"contents": "read"}
    for used in re.findall(r"uses: (.*)$", text, re.MULTILINE):
        assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", used), used
    for job in jobs.values():
        assert "container" not in job or re.search(r"@sha256:[0-9a-f]{64}$", job["container"])
        assert "timeout-minutes" in job or job["permissions"] == {"contents": "write"}
    usage = subprocess.run([ROOT / "build.sh"], capture_output=True, text=True, check=True).stdout
    for verb in re.findall(r"\./build\.sh ([a-z-]+)", text):
        assert re.search(rf"^  {verb}( |$)", usage, re.MULTILINE), verb


def test_release_is_attested_before_it_is_attached() -> None:
    jobs = read(GITHUB / "workflows" / "release.yml")["jobs"]
    assert jobs["wheels"]["permissions"] == {"contents": "read", "id-token": "write", "attestations": "write"}
    uses = [step.get("uses", "").split("@")[0] for step in jobs["wheels"]["steps"]]
    assert uses.index("actions/attest-build-provenance") < uses.index("actions/upload-artifact")
    assert jobs["release"]["needs"] == "wheels"


def test_citation_names_this_version() -> None:
    assert read(ROOT / "CITATION.cff")["version"] == (ROOT / "VERSION").read_text().strip()
