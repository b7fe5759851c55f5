"""The small model: a few steps teach it something, sparse attention at all blocks changes nothing, weights are cached."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs the torch extra: pip install kvpool[torch]")

from kvpool.errors import InvalidArgument  # noqa: E402
from studies.sparse import task_accuracy, training  # noqa: E402
from studies.sparse.local_model import local_model, local_samples  # noqa: E402
from studies.sparse.tiny_model import Shape, TinyModel  # noqa: E402

pytestmark = pytest.mark.torch


def test_all_blocks_answer_as_dense_attention_does() -> None:
    model = TinyModel(Shape(), seed=1)
    read = task_accuracy.read_context(model, 1, "keys", 1024)
    dense = task_accuracy.trained_samples(model, read)
    assert len(dense) == 3
    assert dense[0].queries.shape == (64, 8, 64)
    rows = task_accuracy.SparseRows(read, "clusters7", 1.0)
    assert task_accuracy.is_right(model, read, rows) == task_accuracy.is_right(model, read)


def test_weights_are_read_from_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    trained: list[int] = []
    monkeypatch.setattr(training, "train", lambda model, seed, progress: trained.append(seed))
    first = training.trained_model(7, lambda total, right: None).state_dict()
    again = training.trained_model(7, lambda total, right: None).state_dict()
    assert trained == [7]
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert [path.name for path in (tmp_path / "kvpool").iterdir()] == [training.weights_path(7).name]


def test_a_directory_that_is_no_model_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KVPOOL_SPARSE_MODEL", raising=False)
    assert local_model() is None
    monkeypatch.setenv("KVPOOL_SPARSE_MODEL", str(tmp_path))
    with pytest.raises(InvalidArgument, match=r"config\.json is not there"):
        local_model()


def test_a_local_model_hands_over_its_layers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the demo extra: pip install kvpool[demo]")
    tokenizers = pytest.importorskip("tokenizers", reason="needs the demo extra: pip install kvpool[demo]")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"w{index}": index for index in range(64)} | {"?": 64}, unk_token="?")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(tmp_path)
    config = transformers.MistralConfig(
        vocab_size=80,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=None,
    )
    transformers.MistralForCausalLM(config).save_pretrained(tmp_path)
    text = " ".join(f"w{index % 61}" for index in range(2100))
    with pytest.raises(InvalidArgument, match="10 tokens, expected 2048"):
        local_samples(tmp_path, text[:30], 2048)
    layers = local_samples(tmp_path, text, 2048)
    assert [layer.keys.shape for layer in layers] == [(2, 2048, 8)] * 2
    assert layers[0].queries.shape == (32, 4, 8)
    assert layers[0].visible[-1] == 2048
