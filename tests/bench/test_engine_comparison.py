"""`specdec bench engines`: checkpoints in published formats, a process for each engine, checked texts, one record."""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specdec_kernels import cli
from specdec_kernels.cli.bench.engines import comparison_of
from specdec_kernels.synthetic.acceptance import PublishedAcceptance
from specdec_kernels.synthetic.models import SyntheticText, synthetic_causal_lm, synthetic_eagle3
from specdec_kernels.synthetic.shapes import draft_vocab_of, shape_config

engine_comparison = pytest.importorskip(
    "specdec_kernels.bench.compare.engine_comparison", reason="the package has no bench/"
)

CPU = torch.device("cpu")
TINY = ["--shape", "tiny", "--device", "cpu", "--input", "20", "--output", "70", "--short", "10", "--repeats", "1"]


def bench_engines(*options: str) -> int:
    return cli.main(["bench", "engines", *TINY, *options])


def comparison(*options: str) -> Any:
    return comparison_of(cli.make_parser().parse_args(["bench", "engines", *TINY, *options]), CPU)


@pytest.mark.usefixtures("in_this_process")
def test_bench_engines_measures_ours_of_fewer_layers_and_reuses_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, file = tmp_path / "checkpoints", tmp_path / "run.json"
    options = ["--batch", "2", "--algorithm", "plain,chain", "--engines", "ours,sglang,vllm"]
    checkpoints = ["--acceptance", "math", "--layers", "2", "--out", str(out)]
    assert bench_engines(*options, *checkpoints, "--json", str(file)) == 0
    assert "tiny of 2 layers float32, accept math eagle3, 20 tokens in, 70 out" in capsys.readouterr().out
    assert json.loads((out / "target/config.json").read_text())["num_hidden_layers"] == 2
    run = json.loads(file.read_text())
    assert {"version", "installed", "torch", "transformers", "environment"} < run["engines"]["ours"].keys()
    plain, chain = (r for r in run["results"] if r["params"]["engine"] == "ours")
    assert plain["params"]["algorithm"] == "plain" and plain["params"]["layers"] == 2
    assert plain["facts"]["accept_length"] == 1.0
    assert chain["error"] is None and chain["facts"]["tokens_per_second"] > 0
    assert 2.5 < chain["facts"]["accept_length"] < 5.5  # published: 3.9 of five drafts; here of four requests
    # The same options reuse the checkpoints; others write new ones.
    written = (out / "head/model.safetensors").stat().st_mtime_ns
    engine_comparison.write_checkpoints(comparison(*checkpoints))
    assert (out / "head/model.safetensors").stat().st_mtime_ns == written
    engine_comparison.write_checkpoints(comparison(*checkpoints, "--acceptance", "chat"))
    assert (out / "head/model.safetensors").stat().st_mtime_ns != written


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_is_installed_needs_engine_and_plugin(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = pytest.importorskip("specdec_kernels.bench.compare.engines")
    (tmp_path / engine).mkdir()
    (tmp_path / engine / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [])  # where this package may be installed, with its entry point
    plugin, folders = f"{engine}_plugin", [str(tmp_path)]
    assert engines.is_installed(engine, folders) and not engines.is_installed(plugin, folders)
    described = tmp_path / "specdec_kernels-1.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: specdec-kernels\nVersion: 1\n")
    (described / "entry_points.txt").write_text(
        f"[{engines.PLUGINS[plugin]}]\nspecdec = specdec_kernels.compat.{plugin}:register\n"
    )
    assert engines.is_installed(plugin, folders)


@pytest.mark.parametrize("engine", ["vllm", "vllm_plugin"])
def test_can_run_gives_vllm_chains_only(engine: str) -> None:
    engines = pytest.importorskip("specdec_kernels.bench.compare.engines")
    runs = [name for name, algorithm in engines.ALGORITHMS.items() if engines.can_run(engine, algorithm)]
    blocks = [] if engine.endswith("plugin") else ["dspark_chain", "dflash_chain"]
    assert runs == ["plain", "chain", "adaptive_chain", "mtp_chain", *blocks, "ngram"]
    assert engines.can_run("ours", engines.ALGORITHMS["dspark_tree"])
    assert not engines.can_run("sglang_fa3", engines.ALGORITHMS["dspark_tree"])


def test_vllm_runner_passes_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin is off for `vllm`, and attends for target and drafts for `vllm_plugin`."""
    engines = pytest.importorskip("specdec_kernels.bench.compare.engines")
    started: list[dict[str, Any]] = []
    stub = types.ModuleType("vllm")
    stub.LLM = lambda model, **options: started.append(options)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", stub)
    job = engines.Job("vllm", "chain", "target", "head", "cuda", "bfloat16", 64, [[[[[1]]]]], 2, 8, 1)
    monkeypatch.setenv("SPECDEC_VLLM", "")
    for name, left_in, backend in [("vllm", "0", {}), ("vllm_plugin", "1", {"attention_backend": "CUSTOM"})]:
        importlib.import_module(f"specdec_kernels.bench.compare.engines.{name}").Runner(
            job, engines.ALGORITHMS["chain"]
        )
        options, drafting = started[-1], started[-1]["speculative_config"]
        assert os.environ["SPECDEC_VLLM"] == left_in
        assert {key: options[key] for key in options.keys() & {"attention_backend"}} == backend
        eagle3 = {"method": "eagle3", "model": "head", "num_speculative_tokens": 5} | backend
        assert drafting == eagle3
        importlib.import_module(f"specdec_kernels.bench.compare.engines.{name}").Runner(
            job, engines.ALGORITHMS["adaptive_chain"]
        )
        assert started[-1]["speculative_config"] == eagle3 | {"enable_adaptive_verification": True}
        importlib.import_module(f"specdec_kernels.bench.compare.engines.{name}").Runner(
            job, engines.ALGORITHMS["mtp_chain"]
        )
        assert started[-1]["speculative_config"] == {"method": "mtp", "num_speculative_tokens": 3} | backend
        importlib.import_module(f"specdec_kernels.bench.compare.engines.{name}").Runner(
            job, engines.ALGORITHMS["dspark_chain"]
        )
        dspark = {"method": "dspark", "model": "head", "num_speculative_tokens": 7} | backend
        assert started[-1]["speculative_config"] == dspark
        importlib.import_module(f"specdec_kernels.bench.compare.engines.{name}").Runner(
            job, engines.ALGORITHMS["ngram"]
        )
        assert {key: started[-1][key] for key in started[-1].keys() & {"attention_backend"}} == backend
        proposer = {"method": "custom_class", "model": "specdec_kernels.compat.vllm.NgramProposer"}
        lookup = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5}
        assert started[-1]["speculative_config"] == (proposer if backend else lookup) | {"num_speculative_tokens": 11}
    module, cls = proposer["model"].rsplit(".", 1)
    assert hasattr(importlib.import_module(module), cls)


def test_vllm_runner_has_room_for_states_of_all_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = pytest.importorskip("specdec_kernels.bench.compare.engines")
    vllm = importlib.import_module("specdec_kernels.bench.compare.engines.vllm")
    shape_config("tiny-hybrid").save_pretrained(tmp_path)
    job = engines.Job("vllm", "mtp_chain6", str(tmp_path), "", "cuda", "bfloat16", 64, [[[[[1]] * 2]]], 2, 8, 1)
    algorithm = engines.algorithm_of(job.algorithm)
    state = 4 * 4 * 32 * 32 + 2 * 3 * (2 * 64 + 128)  # float32 matrices of 4 heads, and 3 inputs of 256 channels
    kv = 4 * 2 * 64 * 2  # of keys and values of 2 heads, in the layer with attention and in the MTP layer
    assert vllm.cache_bytes(job, algorithm, 100) == 100 * kv + 2 * (1 + 5) * 3 * state * 5 // 4
    assert vllm.cache_bytes(job, engines.algorithm_of("plain"), 0) == 2 * 3 * state * 5 // 4


def test_runners_pass_options_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = pytest.importorskip("specdec_kernels.bench.compare.engines")
    started: list[dict[str, Any]] = []
    sglang, vllm = types.ModuleType("sglang"), types.ModuleType("vllm")
    sglang.Engine = lambda **options: started.append(options)  # type: ignore[attr-defined]
    vllm.LLM = lambda model, **options: started.append(options)  # type: ignore[attr-defined]
    for name, stub in (("sglang", sglang), ("vllm", vllm)):
        monkeypatch.setitem(sys.modules, name, stub)
        monkeypatch.setenv(f"SPECDEC_{name.upper()}", "")
        job = engines.Job(name, "plain", "t", "h", "cuda", "bfloat16", 64, [[[[[1]]]]], 2, 8, 1, options={"seed": 3})
        module = importlib.import_module(f"specdec_kernels.bench.compare.engines.{name}")
        module.Runner(job, engines.algorithm_of(job.algorithm))
        assert started[-1]["seed"] == 3


def test_vllm_runner_counts_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """EAGLE-3 rounds are counted; n-gram rounds without drafts are computed from accepted tokens."""
    engines = pytest.importorskip("specdec_kernels.bench.compare.engines")
    stub, counters = types.ModuleType("vllm"), {"drafts": 0, "accepted_tokens": 0}

    class LLM:
        def __init__(self, model: str, **options: Any) -> None:
            pass

        def get_metrics(self) -> list[Any]:
            return [types.SimpleNamespace(name=f"vllm:spec_decode_num_{n}", value=v) for n, v in counters.items()]

        def generate(self, prompts: list[Any], sampling: Any, use_tqdm: bool) -> list[Any]:
            counters["drafts"] += 3
            counters["accepted_tokens"] += 5
            return [types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=[1] * 9)]) for _ in prompts]

    stub.LLM, stub.SamplingParams = LLM, dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", stub)
    monkeypatch.setenv("SPECDEC_VLLM", "")
    runner = importlib.import_module("specdec_kernels.bench.compare.engines.vllm").Runner
    job = engines.Job("vllm", "chain", "target", "head", "cuda", "bfloat16", 64, [[[[[1]]]]], 2, 8, 1)
    for algorithm, rounds in (("plain", None), ("chain", 3), ("ngram", 2 * 8 - 5)):
        counters["drafts"] = 100
        assert runner(job, engines.ALGORITHMS[algorithm]).generate([[1], [2]], 9).rounds == rounds


@pytest.mark.parametrize(
    "name, ngram", [("sglang", "NGRAM"), ("sglang_fa3", "NGRAM"), ("sglang_plugin", "SPECDEC_NGRAM")]
)
def test_sglang_runner_passes_options(name: str, ngram: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = pytest.importorskip("specdec_kernels.bench.compare.engines")
    started: list[dict[str, Any]] = []
    stub = types.ModuleType("sglang")
    stub.Engine = lambda **options: started.append(options)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang", stub)
    monkeypatch.setenv("SPECDEC_SGLANG", "")
    job = engines.Job(name, "tree", "target", "head", "cuda", "bfloat16", 64, [[[[[1]] * 4]]], 2, 8, 1)
    for algorithm, expected in (
        ("plain", {}),
        ("tree", {"algorithm": "EAGLE3", "draft_model_path": "head", "num_steps": 5, "eagle_topk": 10, "num_draft_tokens": 32}),
        ("mtp_chain", {"algorithm": "NEXTN", "draft_model_path": "target", "num_steps": 3, "eagle_topk": 1, "num_draft_tokens": 4}),
        ("dflash_chain", {"algorithm": "DFLASH", "draft_model_path": "head", "num_draft_tokens": 8}),
        ("dspark_chain", {"algorithm": "DSPARK", "draft_model_path": "head", "num_draft_tokens": 8}),
        ("ngram", {"algorithm": ngram, "num_draft_tokens": 12}),
    ):  # fmt: skip
        importlib.import_module(f"specdec_kernels.bench.compare.engines.{name}").Runner(
            job, engines.ALGORITHMS[algorithm]
        )
        drafting = {key: value for key, value in started[-1].items() if key.startswith("speculative_")}
        assert drafting == {f"speculative_{key}": value for key, value in expected.items()}
        assert started[-1]["max_running_requests"] == 5  # one that is read in chunks counts twice


SERVER = """
import sys, json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
flags = sys.argv[1:]
assert "--skip-tokenizer-init" in flags and flags[flags.index("--attention-backend") + 1] == "fa3"
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *of): pass
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404); self.end_headers()
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        count = body["sampling_params"]["max_new_tokens"]
        self.send_response(200 if self.path == "/generate" and count < 9 else 400); self.end_headers()
        for n in range(1, count + 1):
            event = {"output_ids": [body["input_ids"][0]] * n, "meta_info": {"spec_verify_ct": n}}
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\\n\\n")
        self.wfile.write(b"data: [DONE]\\n\\n")
ThreadingHTTPServer(("127.0.0.1", int(flags[flags.index("--port") + 1])), Handler).serve_forever()
"""


def test_sglang_runner_streams_from_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = pytest.importorskip("specdec_kernels.bench.compare.engines")
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang/__init__.py").touch()
    (tmp_path / "sglang/launch_server.py").write_text(SERVER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("SPECDEC_SGLANG", "")
    batches = [[[[[1]] * 4]]]
    job = engines.Job("sglang_fa3", "tree", "target", "head", "cuda", "bfloat16", 64, batches, 2, 8, 1, served=True)
    runner = importlib.import_module("specdec_kernels.bench.compare.engines.sglang_fa3").Runner(
        job, engines.ALGORITHMS["tree"]
    )
    try:
        generated = runner.generate([[5], [6], [7]], 4)
        assert generated.tokens == [[5] * 4, [6] * 4, [7] * 4] and generated.rounds == 12
        with pytest.raises(RuntimeError, match=r"^/generate answered b'HTTP/1.1 400 .*', expected a stream of events"):
            runner.generate([[5]], 9)
    finally:
        runner.engine.shutdown()


def test_bench_engines_drafts_ngrams_from_prompts_with_two_runs_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.json"
    options = ["--batch", "2", "--algorithm", "plain,ngram", "--engines", "ours,vllm", "--together", "2"]
    assert bench_engines(*options, "--input", "70", "--out", str(tmp_path), "--json", str(file)) == 0
    assert "tiny float32, accept code eagle3, quotes of 4 to 24, 70 tokens in" in capsys.readouterr().out
    plain, ngram = (r for r in json.loads(file.read_text())["results"] if r["params"]["engine"] == "ours")
    assert plain["error"] is None and ngram["error"] is None
    assert ngram["params"]["accept"] == "quotes of 4 to 24" and ngram["params"]["nodes"] == 12
    assert 1.5 < ngram["facts"]["accept_length"] < 8  # some n-grams are found, not all
    report = importlib.import_module("specdec_kernels.bench.report.report").report(
        {"here": json.loads(file.read_text())}
    )
    assert "accept=code eagle3, quotes of 4 to 24 " in report and "| ngram (11, 1, 12) | 2 | " in report


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run engines in this process, which has imported torch and transformers."""
    worker = importlib.import_module("specdec_kernels.bench.compare.engines.worker")
    monkeypatch.setattr(engine_comparison, "run_limited", lambda command, *others: worker.main(command[-2:]))


@pytest.mark.usefixtures("in_this_process")
def test_bench_engines_drafts_with_an_mtp_layer_in_the_target(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    options = ["--shape", "tiny-hybrid", "--acceptance", "chat", "--out", str(tmp_path)]
    run = [
        "--batch",
        "2",
        "--engines",
        "ours",
        "--algorithm",
        "mtp_chain,mtp_chain2",
        "--output",
        "120",
        "--json",
        str(file),
    ]
    assert bench_engines(*options, *run, "--options", 'ours={"page_size": 4}') == 0
    found = json.loads(file.read_text())
    assert found["engines"]["ours"]["options"] == {"page_size": 4}
    chain, short = found["results"]
    assert short["error"] is None and (short["params"]["num_steps"], short["params"]["nodes"]) == (1, 2)
    assert short["facts"]["accept_length"] == pytest.approx(1.763, rel=0.15)
    assert chain["error"] is None
    assert chain["params"]["accept"] == "chat mtp" and chain["params"]["nodes"] == 4
    assert chain["facts"]["accept_length"] == pytest.approx(1 + 0.763 * (1 + 0.817 * (1 + 0.737)), rel=0.15)
    assert not (tmp_path / "head").exists()
    # Plain decoding runs on the same checkpoint.
    written = (tmp_path / "target/mtp.safetensors").stat().st_mtime_ns
    engine_comparison.write_checkpoints(comparison(*options, "--algorithm", "plain"))
    assert (tmp_path / "target/mtp.safetensors").stat().st_mtime_ns == written
    engine_comparison.write_checkpoints(comparison(*options, "--algorithm", "chain"))
    assert (tmp_path / "head").exists() and (tmp_path / "target/mtp.safetensors").stat().st_mtime_ns != written


def test_latent_targets_are_written_as_their_families_publish_them(tmp_path: Path) -> None:
    options = ["--shape", "tiny-latent", "--acceptance", "chat", "--out", str(tmp_path), "--algorithm", "plain"]
    engine_comparison.write_checkpoints(comparison(*options))
    names = set(load_file(tmp_path / "target/mtp.safetensors"))
    layer = "model.layers.4."  # after the target's own
    assert {layer + part + ".weight" for part in ("enorm", "hnorm", "eh_proj", "shared_head.norm")} <= names
    assert all(name.startswith(layer) for name in names)
    config = json.loads((tmp_path / "target/config.json").read_text())
    wanted = {"num_nextn_predict_layers": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1}
    wanted |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "rope_theta": 1e4}
    assert wanted.items() <= config.items()


def of_two_chats(folder: Path, algorithms: str, *, output: int) -> list[dict[str, Any]]:
    """Return our engine's results for a batch of two; checkpoints are in the folder's `checkpoints`."""
    file, out = folder / "run.json", folder / "checkpoints"
    options = ["--acceptance", "chat", "--out", str(out), "--batch", "2", "--engines", "ours", "--output", str(output)]
    assert bench_engines(*options, "--algorithm", algorithms, "--json", str(file)) == 0
    results: list[dict[str, Any]] = json.loads(file.read_text())["results"]
    return results


@pytest.mark.exhaustive
def test_bench_engines_drafts_with_block_drafters_in_folders_of_their_own(tmp_path: Path) -> None:
    out = tmp_path / "checkpoints"
    chain, tree = of_two_chats(tmp_path, "dspark_chain,dspark_tree", output=120)
    assert chain["params"]["accept"] == "chat dspark" and chain["params"]["nodes"] == 8
    assert chain["facts"]["accept_length"] == pytest.approx(3.51, rel=0.15)
    assert tree["facts"]["accept_length"] > chain["facts"]["accept_length"] + 0.5
    assert json.loads((out / "dspark/config.json").read_text())["architectures"] == ["Qwen3DSparkModel"]
    assert not (out / "head").exists() and not (out / "dflash").exists()


@pytest.mark.exhaustive
def test_bench_engines_of_a_union_accepts_more_of_quoting_prompts(tmp_path: Path) -> None:
    """In chains of 8 the index alone accepts what prompts quote, and the union what either drafts."""
    tree, union = of_two_chats(tmp_path, "dspark_tree16,dspark_tree16+ngram", output=60)
    assert [r["params"]["algorithm"] for r in (tree, union)] == ["dspark_tree16", "dspark_tree16+ngram"]
    assert union["params"]["accept"] == "chat dspark, quotes of 4 to 24" and union["error"] is None
    assert union["facts"]["accept_length"] > tree["facts"]["accept_length"] + 0.3


def test_unions_are_ours_alone_and_their_prompts_quote_the_drafted_text() -> None:
    engines = pytest.importorskip("specdec_kernels.bench.compare.engines")
    union = engines.algorithm_of("dspark_tree16+ngram")
    assert (union.drafter, union.num_nodes, union.with_ngrams, union.is_quoted) == ("dspark", 16, True, True)
    assert engines.can_run("ours", union) and not engines.algorithm_of("dspark_tree16").is_quoted
    for engine in ("sglang", "sglang_plugin", "vllm", "vllm_plugin"):
        assert not engines.can_run(engine, engines.algorithm_of("chain+ngram"))
    c = comparison("--shape", "tiny", "--acceptance", "chat", "--out", "x", "--batch", "2", "--output", "30")
    (of_batch,) = engine_comparison.runs_of_batches(c, c.text, "tree+ngram")
    requests = [request for wave in of_batch[0] for request in wave]
    assert len(of_batch) == 3 and len(requests) == 4
    for request in requests:
        start = c.text.order.tolist().index(request.prompt[-1]) + 1
        assert request.answer == c.text.tokens(start, 30) and len(request.prompt) == c.input
        assert set(request.answer[:10]) & set(request.prompt)


def test_quoting_prompts_quote_the_answer() -> None:
    config = shape_config("tiny")
    text = SyntheticText.of(config.vocab_size, draft_vocab_of(config))
    piece = text.other_tokens(100, 8 + 60)
    for length in (5, 8, 40, 100, 300):
        request = engine_comparison.quoting(piece, length, text.order)
        assert len(request.prompt) == length and request.answer == piece[8:]
        lead = min(8, length)
        assert request.prompt[-lead:] == piece[8 - lead : 8]
        quoted = [token for token in request.prompt[:-lead] if token in piece]
        assert quoted == sorted(quoted, key=piece.index) and set(quoted) <= set(request.answer)
        if length >= 100:
            assert 0.6 * 60 < len(quoted) < 60  # the rest is between the quotes
    assert engine_comparison.quoting(piece, 90, text.order) == engine_comparison.quoting(piece, 90, text.order)


def test_runs_of_batches_use_no_ngram_text_twice() -> None:
    config = shape_config("tiny")
    text = SyntheticText.of(config.vocab_size, draft_vocab_of(config))
    sizes = comparison("--batch", "1,2", "--output", "20", "--out", "x")
    batches = engine_comparison.runs_of_batches(sizes, text, "ngram")
    assert [len(runs) for runs in batches] == [3, 3]
    assert [[len(waves) for waves in runs] for runs in batches] == [[4] * 3, [2] * 3]
    answers = [request.answer for runs in batches for waves in runs[1:] for wave in waves for request in wave]
    assert [len(answer) for answer in answers] == [10] * 4 + [20] * 4 + [10] * 4 + [20] * 4
    first = [request.answer for runs in batches for wave in runs[0] for request in wave]
    assert [len(answer) for answer in first] == [20] * 8  # does not count, and belongs to the other text
    assert not {token for answer in first for token in answer} & set(text.other_order.tolist())
    tokens = [token for answer in answers for token in answer]
    assert len(tokens) == len(set(tokens))
    chains = engine_comparison.runs_of_batches(sizes, text, "chain")
    assert chains[0][0] is chains[0][2] and len(chains[0]) == 3  # the same texts, since there is no n-gram lookup


def test_bench_engines_names_an_engine_that_exceeds_the_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = tmp_path / "logs"
    options = ["--batch", "1", "--algorithm", "plain", "--engines", "ours", "--limit", "0.05", "--logs", str(logs)]
    assert bench_engines(*options, "--out", str(tmp_path), "--json", str(tmp_path / "run.json")) == 2
    assert "engines: ours plain took more than 0.05 s" in capsys.readouterr().err
    assert (logs / "ours-plain.log").exists()
    (result,) = json.loads((tmp_path / "run.json").read_text())["results"]
    assert result["skipped"] == "ours took more than 0.05 s" and "facts" not in result


def test_result_of_a_wrong_text_is_an_error() -> None:
    config = shape_config("tiny")
    text = SyntheticText.of(config.vocab_size, draft_vocab_of(config))
    params = {"batch": 4, "input": 5, "output": 8, "short": 2}
    (wave,) = engine_comparison.starts_of(text, 4)
    answers = [text.tokens(at + 5, 8) for at in wave]
    line: dict[str, Any] = {
        "seconds": {"short": [1.0, 1.0], "long": [3.0, 5.0]},
        "tokens": [list(answer) for answer in answers],
        "rounds": 14,
    }
    right = engine_comparison.result_of(params, line, answers, 1.5, CPU)
    assert right.facts == {"tokens_per_second": 8.0, "start_seconds": 1.5, "spread": 0.5, "accept_length": 2.0}
    line["tokens"][2][7] += 1
    wrong = engine_comparison.result_of(params, line, answers, 1.5, CPU)
    assert wrong.error == "request 2 differs from the synthetic text" and not wrong.facts


def test_write_eagle3_uses_the_published_format(tmp_path: Path) -> None:
    config = shape_config("tiny")
    text = SyntheticText.of(config.vocab_size, draft_vocab_of(config))
    target = synthetic_causal_lm(config, text, device=CPU, dtype=torch.float32)
    engine_comparison.write_eagle3(synthetic_eagle3(target, text, PublishedAcceptance("chat")), tmp_path)
    tensors, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    assert {"fc.weight", "norm.weight", "lm_head.weight", "midlayer.self_attn.q_proj.weight"} < tensors.keys()
    assert not any(name.startswith("embed_tokens") for name in tensors)
    ids = torch.arange(1024) + tensors["d2t"]
    assert torch.equal(ids, text.draft_ids) and torch.equal(tensors["t2d"].nonzero()[:, 0], ids)
    left = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [layer + 1 for layer in left]
    assert config["draft_vocab_size"] == 1024 and config["architectures"] == ["LlamaForCausalLMEagle3"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--algorithm", "ngram", "--batch", "1,8"],
            "specdec bench engines: ngram takes 1152 tokens of text, expected at most 1024: ask for fewer or smaller batches, a shorter "
            "--output or fewer --repeats",
        ),
        (["--short", "70"], "--short is 70, expected less than --output 70"),
        (["--engines", "tgi"], "'tgi' is not one of ours, sglang, sglang_fa3, sglang_plugin, vllm, vllm_plugin"),
        (["--algorithm", "ngram8"], "'ngram8' is not one of plain, chain, tree, adaptive, adaptive_chain, mtp_chain, "),
        (
            ["--options", "ours=[]"],
            "'ours=[]' is not ENGINE=JSON with an object, of ours, sglang, sglang_fa3, sglang_plugin, vllm, vllm_plugin",
        ),
        (["--json", "/"], "specdec bench engines: --json / cannot be written, expected a file's name"),
        (
            ["--path", "sglang"],
            "'sglang' is not ENGINE=FOLDER, of ours, sglang, sglang_fa3, sglang_plugin, vllm, vllm_plugin",
        ),
    ],
)
def test_bench_engines_refuses_bad_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    try:
        code = bench_engines("--out", str(tmp_path), *options)
    except SystemExit as stop:
        code = stop.code
    assert code == 2 and message in capsys.readouterr().err


def test_is_installed_searches_folders(tmp_path: Path) -> None:
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang/__init__.py").write_text("")
    assert engine_comparison.is_installed("sglang", [str(tmp_path)])
    assert engine_comparison.is_installed("ours", [])


def test_worker_turn_waits_for_other_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = pytest.importorskip("specdec_kernels.bench.compare.engines")
    worker = importlib.import_module("specdec_kernels.bench.compare.engines.worker")
    job = engines.Job("ours", "plain", "", "", "cpu", "float32", 64, [[[[[1]] * 4]]], 2, 8, 1, str(tmp_path), 2)
    assert engines.kv_tokens(job) == 4 * 64 * 5 // 4
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        (tmp_path / "sglang-tree ended").touch()  # as the process that waits for it sees it

    monkeypatch.setattr(worker.time, "sleep", sleep)
    with worker.turn(job):
        assert waits == [0.1]
        with (tmp_path / "turn").open("w") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with (tmp_path / "turn").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    ours, tree, vllm = ("ours", "plain"), ("ours", "tree"), ("vllm", "plain")
    assert engine_comparison.groups_of(["ours", "vllm"], ["plain", "tree"], 2) == [[ours, vllm], [tree]]
    assert engine_comparison.groups_of(["ours", "vllm"], ["plain", "tree"], 1) == [[ours], [vllm], [tree]]
    assert engine_comparison.groups_of(["ours", "sglang"], ["tree"], 2, served=True) == [[("sglang", "tree")]]


def test_how_installed_names_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = pytest.importorskip("specdec_kernels.bench.compare.engines")
    for url, expected in (
        ("file:///home/me/wheels/engine-1.0%2Bcu13-py3-none-any.whl", "engine-1.0+cu13-py3-none-any.whl"),
        ("https://example.org/engine.whl", "https://example.org/engine.whl"),
    ):
        found = types.SimpleNamespace(read_text=lambda name, url=url: json.dumps({"url": url}))
        monkeypatch.setattr("importlib.metadata.distribution", lambda package, found=found: found)
        assert engines.how_installed("engine") == expected
