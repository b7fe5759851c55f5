"""Small models with random weights, made on the spot: configuration and safetensors, written by numpy alone.

Weights come from a seed, so that a model made anywhere is the same one. They are spread so widely that greedy tokens depend on
all of the prompt: a wrong byte of KV shows in them. No tokenizer is made; prompts are token ids.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

VOCABULARY = 1024
CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class Geometry:
    """A model. `spread` is the standard deviation of its weights, `dtype` what the engine computes in."""

    name: str
    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    spread: float
    dtype: str
    seed: int


# Computed in float32, where a token does not depend on how requests are put together: what differs is wrong.
GROUPED = Geometry("grouped", "LlamaForCausalLM", 4, 256, 4, 2, 64, 512, 0.2, "float32", 1)
# The same shape as GROUPED, other weights.
STRANGER = Geometry("stranger", "LlamaForCausalLM", 4, 256, 4, 2, 64, 512, 0.2, "float32", 2)
# One KV head for all query heads: every rank of several has it.
SINGLE = Geometry("single", "LlamaForCausalLM", 4, 256, 4, 1, 64, 512, 0.2, "float32", 14)
# Every head has KV of its own, biases, another head size, another depth.
FULL = Geometry("full", "Qwen2ForCausalLM", 6, 384, 4, 4, 96, 768, 0.15, "float32", 3)
# The usual data type of engines. Its last bits depend on the batch.
BRAIN = Geometry("brain", "LlamaForCausalLM", 3, 256, 8, 2, 128, 512, 0.2, "bfloat16", 4)
# Deep enough for a realistic cost of prefill.
DEEP = Geometry("deep", "LlamaForCausalLM", 12, 1024, 16, 4, 64, 2816, 0.1, "bfloat16", 5)

# Latent attention (MLA), dense layers alone: one latent vector of 512 and one rotary of 64 for each token, of all heads.
LATENT = Geometry("latent", "DeepseekV2ForCausalLM", 3, 256, 4, 4, 64, 512, 0.1, "float32", 6)
LATENT_RANK, ROTARY = 512, 64

# One layer that attends to all tokens, to three that attend to the last WINDOW ones.
HYBRID = Geometry("hybrid", "Gemma3ForCausalLM", 8, 256, 4, 2, 64, 512, 0.08, "float32", 7)
# Every layer attends to the last WINDOW tokens.
WINDOWED = Geometry("windowed", "MistralForCausalLM", 4, 256, 4, 2, 64, 512, 0.2, "float32", 9)
# Layers of a window and of full attention in turns, sinks, biases, experts.
EXPERTS = Geometry("experts", "GptOssForCausalLM", 4, 256, 4, 2, 64, 128, 0.15, "float32", 10)
EXPERT_COUNT, EXPERT_WINDOW = 4, 128
WINDOW, WINDOWS_TO_ONE_FULL = 64, 3
# Layers of full attention with other numbers of KV heads; its configuration is code beside its weights, as this family's is.
UNEVEN = Geometry("uneven", "DeciLMForCausalLM", 4, 256, 4, 2, 64, 512, 0.2, "float32", 12)
UNEVEN_KV_HEADS = (2, 1, 2, 4)
UNEVEN_CODE = """
from types import SimpleNamespace
from transformers import LlamaConfig

class UnevenConfig(LlamaConfig):
    model_type = "nemotron-nas"

    def __init__(self, heads_in_groups=(), **rest):
        super().__init__(**rest)
        self.heads_in_groups = heads_in_groups

    @property
    def block_configs(self):
        ffn = SimpleNamespace(no_op=False, intermediate_size=self.intermediate_size, hidden_act=self.hidden_act)
        return [
            SimpleNamespace(attention=SimpleNamespace(no_op=False, n_heads_in_group=heads), ffn=ffn)
            for heads in self.heads_in_groups
        ]
"""
# Three layers with a recurrent state (the gated delta rule, which vLLM computes on a CPU in bfloat16 alone) to one of full
# attention.
RECURRENT = Geometry("recurrent", "Qwen3NextForCausalLM", 4, 256, 4, 2, 64, 512, 0.1, "bfloat16", 11)
KEY_HEADS, VALUE_HEADS, CONVOLVED = 4, 8, 4
# vLLM makes its blocks of attention as large as a state.
RECURRENT_BLOCK = 288
# The logarithm of how fast a state decays: slowly, so that all of the prompt is seen in the tokens.
DECAY = -5.0
# Layers that attend within pieces of PIECE tokens, and every fourth to all tokens, without positions.
LOCAL = Geometry("local", "Llama4ForCausalLM", 4, 256, 4, 2, 64, 512, 0.2, "float32", 13)
PIECE = 256
# Architectures whose layers vLLM divides into several groups.
HYBRIDS = ("Gemma3ForCausalLM", "GptOssForCausalLM", "Qwen3NextForCausalLM", "Llama4ForCausalLM")
MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "Gemma3ForCausalLM": "gemma3_text",
    "MistralForCausalLM": "mistral",
    "GptOssForCausalLM": "gpt_oss",
    "Qwen3NextForCausalLM": "qwen3_next",
    "DeciLMForCausalLM": "nemotron-nas",
    "Llama4ForCausalLM": "llama4_text",
}


def write_model(geometry: Geometry, directory: Path) -> Path:
    """Write the model below `directory`; its path."""
    path = directory / geometry.name
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(_config(geometry), indent=1))
    if geometry is UNEVEN:
        (path / "configuration_uneven.py").write_text(UNEVEN_CODE)
    _write_safetensors(path / "model.safetensors", _shapes(geometry), geometry)
    return path


def _config(geometry: Geometry) -> dict[str, object]:
    latent = {
        "kv_lora_rank": LATENT_RANK,
        "q_lora_rank": None,
        "qk_rope_head_dim": ROTARY,
        "qk_nope_head_dim": geometry.head_dim,
        "v_head_dim": geometry.head_dim,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "first_k_dense_replace": geometry.layers,
    }
    windows = {"sliding_window": WINDOW} if geometry.architecture.startswith(("Gemma3", "Mistral")) else {}
    hybrid = {
        "layer_types": [
            "full_attention" if layer % (WINDOWS_TO_ONE_FULL + 1) == WINDOWS_TO_ONE_FULL else "sliding_attention"
            for layer in range(geometry.layers)
        ],
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": geometry.head_dim,
        "rope_local_base_freq": 10000.0,
    }
    experts = {
        "layer_types": ["sliding_attention", "full_attention"] * (geometry.layers // 2),
        "sliding_window": EXPERT_WINDOW,
        "num_local_experts": EXPERT_COUNT,
        "num_experts_per_tok": 2,
        "attention_bias": True,
    }
    recurrent = {
        "layer_types": ["linear_attention"] * (geometry.layers - 1) + ["full_attention"],
        "linear_conv_kernel_dim": CONVOLVED,
        "linear_key_head_dim": geometry.head_dim,
        "linear_value_head_dim": geometry.head_dim,
        "linear_num_key_heads": KEY_HEADS,
        "linear_num_value_heads": VALUE_HEADS,
        "num_experts": EXPERT_COUNT,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": geometry.inner // EXPERT_COUNT,
        "shared_expert_intermediate_size": geometry.inner,
        "mlp_only_layers": list(range(geometry.layers - 1)),
    }
    return {
        **_own_fields(geometry),
        **(latent if geometry is LATENT else {"head_dim": geometry.head_dim}),
        **(recurrent if geometry is RECURRENT else {}),
        **(experts if geometry.architecture.startswith("GptOss") else {}),
        **windows,
        **(hybrid if geometry.architecture.startswith("Gemma3") else {}),
        "architectures": [geometry.architecture],
        "model_type": MODEL_TYPES[geometry.architecture],
        "vocab_size": VOCABULARY,
        "hidden_size": geometry.hidden,
        "intermediate_size": geometry.inner,
        "num_hidden_layers": geometry.layers,
        "num_attention_heads": geometry.heads,
        "num_key_value_heads": geometry.kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        **({} if geometry.architecture.startswith("GptOss") else {"rope_theta": 10000.0}),
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }


def _own_fields(geometry: Geometry) -> dict[str, object]:
    """Fields that the configuration of one family alone has."""
    if geometry is UNEVEN:
        return {
            "auto_map": {"AutoConfig": "configuration_uneven.UnevenConfig"},
            "heads_in_groups": [geometry.heads // heads for heads in UNEVEN_KV_HEADS],
        }
    if geometry is LOCAL:
        return {
            "no_rope_layers": [int((layer + 1) % 4 != 0) for layer in range(geometry.layers)],
            "attention_chunk_size": PIECE,
            "interleave_moe_layer_step": geometry.layers + 1,
            "intermediate_size_mlp": geometry.inner,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
        }
    return {}


def _shapes(geometry: Geometry) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor, in the names of the Llama and Qwen2 families."""
    query, kv = geometry.heads * geometry.head_dim, geometry.kv_heads * geometry.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, geometry.hidden)}
    for layer in range(geometry.layers):
        here = f"model.layers.{layer}"
        if geometry is UNEVEN:
            kv = UNEVEN_KV_HEADS[layer] * geometry.head_dim
        if geometry is RECURRENT:
            shapes |= _recurrent_shapes(here, geometry)
            continue
        if geometry is LATENT:
            shapes |= _latent_shapes(f"{here}.self_attn", geometry)
        for name, width in (("q", query), ("k", kv), ("v", kv)) if geometry is not LATENT else ():
            shapes[f"{here}.self_attn.{name}_proj.weight"] = (width, geometry.hidden)
            if geometry.architecture.startswith(("Qwen2", "GptOss")):
                shapes[f"{here}.self_attn.{name}_proj.bias"] = (width,)
        shapes[f"{here}.self_attn.o_proj.weight"] = (geometry.hidden, query)
        shapes |= _feed_forward_shapes(here, geometry)
        is_hybrid = geometry.architecture.startswith("Gemma3")
        for name in ("q_norm", "k_norm") if is_hybrid else ():
            shapes[f"{here}.self_attn.{name}.weight"] = (geometry.head_dim,)
        for name in ("input", "post_attention", *(("pre_feedforward", "post_feedforward") if is_hybrid else ())):
            shapes[f"{here}.{name}_layernorm.weight"] = (geometry.hidden,)
    shapes["model.norm.weight"] = (geometry.hidden,)
    shapes["lm_head.weight"] = (VOCABULARY, geometry.hidden)
    return shapes


def _feed_forward_shapes(layer: str, geometry: Geometry) -> dict[str, tuple[int, ...]]:
    """Of a layer with or without experts."""
    hidden, inner = geometry.hidden, geometry.inner
    if not geometry.architecture.startswith("GptOss"):
        part = f"{layer}.feed_forward" if geometry is LOCAL else f"{layer}.mlp"
        up = {f"{part}.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        return {**up, f"{part}.down_proj.weight": (hidden, inner)}
    return {
        f"{layer}.self_attn.o_proj.bias": (hidden,),
        f"{layer}.self_attn.sinks": (geometry.heads,),
        f"{layer}.mlp.router.weight": (EXPERT_COUNT, hidden),
        f"{layer}.mlp.router.bias": (EXPERT_COUNT,),
        f"{layer}.mlp.experts.gate_up_proj": (EXPERT_COUNT, hidden, 2 * inner),
        f"{layer}.mlp.experts.gate_up_proj_bias": (EXPERT_COUNT, 2 * inner),
        f"{layer}.mlp.experts.down_proj": (EXPERT_COUNT, inner, hidden),
        f"{layer}.mlp.experts.down_proj_bias": (EXPERT_COUNT, hidden),
    }


def _is_last(layer: str, geometry: Geometry) -> bool:
    return layer.endswith(f".{geometry.layers - 1}")


def _recurrent_shapes(layer: str, geometry: Geometry) -> dict[str, tuple[int, ...]]:
    """Of a layer in the names of Qwen3-Next: the last one attends to all tokens, with gates beside its queries, and has
    experts."""
    hidden, width = geometry.hidden, geometry.head_dim
    query, kv = geometry.heads * width, geometry.kv_heads * width
    keys, values = KEY_HEADS * width, VALUE_HEADS * width
    norms: dict[str, tuple[int, ...]] = {
        f"{layer}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")
    }
    if _is_last(layer, geometry):
        widths = {"q": (2 * query, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, query)}
        attention = f"{layer}.self_attn"
        return {
            **{f"{attention}.{name}_proj.weight": shape for name, shape in widths.items()},
            **{f"{attention}.{name}_norm.weight": (width,) for name in ("q", "k")},
            **_mixture_shapes(f"{layer}.mlp", geometry),
            **norms,
        }
    return {
        f"{layer}.linear_attn.dt_bias": (VALUE_HEADS,),
        f"{layer}.linear_attn.A_log": (VALUE_HEADS,),
        f"{layer}.linear_attn.conv1d.weight": (2 * keys + values, 1, CONVOLVED),
        f"{layer}.linear_attn.in_proj_qkvz.weight": (2 * keys + 2 * values, hidden),
        f"{layer}.linear_attn.in_proj_ba.weight": (2 * VALUE_HEADS, hidden),
        f"{layer}.linear_attn.norm.weight": (width,),
        f"{layer}.linear_attn.out_proj.weight": (hidden, values),
        **_feed_forward_shapes(layer, geometry),
        **norms,
    }


def _mixture_shapes(experts: str, geometry: Geometry) -> dict[str, tuple[int, ...]]:
    """Of experts beside a shared one, in the names of Qwen3-Next."""
    hidden, inner = geometry.hidden, geometry.inner
    shapes: dict[str, tuple[int, ...]] = {
        f"{experts}.gate.weight": (EXPERT_COUNT, hidden),
        f"{experts}.shared_expert_gate.weight": (1, hidden),
    }
    sizes = {f"experts.{number}": inner // EXPERT_COUNT for number in range(EXPERT_COUNT)} | {"shared_expert": inner}
    for name, width in sizes.items():
        shapes |= {f"{experts}.{name}.{which}_proj.weight": (width, hidden) for which in ("gate", "up")}
        shapes[f"{experts}.{name}.down_proj.weight"] = (hidden, width)
    return shapes


def _latent_shapes(attention: str, geometry: Geometry) -> dict[str, tuple[int, ...]]:
    """In the names of the DeepSeek family."""
    return {
        f"{attention}.q_proj.weight": (geometry.heads * (geometry.head_dim + ROTARY), geometry.hidden),
        f"{attention}.kv_a_proj_with_mqa.weight": (LATENT_RANK + ROTARY, geometry.hidden),
        f"{attention}.kv_a_layernorm.weight": (LATENT_RANK,),
        f"{attention}.kv_b_proj.weight": (geometry.heads * 2 * geometry.head_dim, LATENT_RANK),
    }


def _write_safetensors(path: Path, shapes: dict[str, tuple[int, ...]], geometry: Geometry) -> None:
    """A length of eight bytes, a JSON header, then the tensors as bfloat16 in the header's order."""
    header, offset = {}, 0
    for name, shape in shapes.items():
        end = offset + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    generator = np.random.default_rng(geometry.seed)
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for name, shape in shapes.items():
            is_norm = name.endswith("norm.weight")
            values = np.ones(shape, np.float32) if is_norm else generator.standard_normal(shape, np.float32)
            if not is_norm:
                values *= geometry.spread
            if name.endswith("A_log"):
                values += np.float32(DECAY)
            file.write((values.view(np.uint32) >> 16).astype(np.uint16).tobytes())
