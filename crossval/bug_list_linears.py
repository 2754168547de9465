"""The planted bugs in BitLinear: scales, packed layouts, activation quantisation, accumulators."""

from __future__ import annotations

from bug_list import HF_FOLDER, bug

QUANT, WEIGHTS = "reference/quantization.py", "reference/weights.py"
PACKING, CHECKPOINT = "formats/packing.py", "formats/checkpoint.py"

OUT = "blocks.0.attn.q_proj.hook_out"
ACC = "blocks.0.attn.q_proj.hook_acc_int32"
X_INT8 = "blocks.0.attn.q_proj.hook_x_*"

LAYER_READ = "    return kind(**family.make_layer(config, parts))\n"
THIRDS = """    from dataclasses import replace
    names = ("q_proj", "k_proj", "v_proj")
    fused = [parts[name] for name in names]
    third, row = sum(w.shape[0] for w in fused) / 3, 0
    for name, w in zip(names, fused):
        scales = [fused[min(int((row + i) / third), 2)].w_dequant_scale for i in range(w.shape[0])]
        parts[name] = replace(w, w_dequant_scale=np.array(scales, dtype=np.float32))
        row += w.shape[0]
"""
READ = "        weight = read_matrix(checkpoint, name)\n"
PERMUTE = """        if short in ("q_proj", "k_proj"):
            d, n = checkpoint.config.head_dim, weight.shape[0]
            rows = [h * d + j % 2 * (d // 2) + j // 2 for h in range(n // d) for j in range(d)]
            weight = type(weight).from_ternary(weight.ternary()[rows], weight.w_dequant_scale).called(name)
"""
FROM_HF = "        return pack_from_hf(plane) if packed is None else packed\n"
# The matrix is written as I2_S (x86) rightly, and read back wrongly.
I2S_WRITTEN = """        w = quantization.unpack_ternary(pack_from_hf(plane), in_features)
        codes = (w + 1).astype(np.uint8).reshape(-1, 4, 32)
        data = codes[:, 0] << 6 | codes[:, 1] << 4 | codes[:, 2] << 2 | codes[:, 3]
"""
I2S_LOW_BITS_FIRST = """        quarters = [data & 3, data >> 2 & 3, data >> 4 & 3, data >> 6 & 3]
        return quantization.pack_ternary(np.stack(quarters, axis=1).reshape(w.shape).astype(np.int8) - 1)
"""
I2S_AS_ARM = """        data = data.reshape(-1, 16)
        quarters = [data >> 6 & 3, data >> 4 & 3, data >> 2 & 3, data & 3]
        return quantization.pack_ternary(np.stack(quarters, axis=1).reshape(w.shape).astype(np.int8) - 1)
"""
PRODUCT = "        y: Floats = be.dequantize(be.ternary_matmul(x_q, self), self, x_quant_scale)\n        return y\n"
Q8_K = """        y = np.zeros((len(x), self.shape[0]), dtype=np.float32)
        for at in range(0, x.shape[1], 256):
            part = x[:, at : at + 256]
            largest = [row[np.argmax(np.abs(row))] for row in part]  # with its sign
            d = np.array([value / np.float32(-127) for value in largest], dtype=np.float32)[:, None]
            sums = np.minimum(np.rint(part * (1 / d)), 127) @ self.ternary()[:, at : at + 256].T
            y += d * sums.astype(np.float32)
        return y * self.w_dequant_scale
"""
DENSE = """        from .layers import dense_matmul
        return dense_matmul(x, self.ternary() * self.w_dequant_scale)
"""
ROUNDED = "np.rint(x * x_quant_scale)"
AWAY = "np.trunc(x * x_quant_scale + np.copysign(np.float32(0.5), x))"
CLIPPED = "np.clip(np.rint(x * x_quant_scale), -128, 127)"
SCALE = "    x_quant_scale = x.dtype.type(127)"
ACC_LINE = "        acc[:, start : start + rows] = x @ w_t.T\n"
ACC_END = ACC_LINE + "    return acc\n"
BF16 = """        import ml_dtypes
        acc[:, start : start + rows] = (x @ w_t.T).astype(ml_dtypes.bfloat16).astype(np.int32)
"""
EXACT = "    exact = np.float32 if"
REFUSED = """    if in_features % 128:
        return np.zeros((len(x_q), len(packed)), dtype=np.int32)
"""

ABSMEAN = "    w_dequant_scale = absmean_scale(w)\n"
BY_ROW = "    w_dequant_scale = np.abs(w).mean(1, keepdims=True)\n"
PLANES = "    return np.clip(np.rint(w_scaled), -1, 1).astype(np.int8), w_dequant_scale"
QUOTIENT = "    w_scaled = w.astype(np.float32) * (np.float32(1.0) / w_dequant_scale)\n"
IN_BF16 = """    import ml_dtypes
    inverse = ml_dtypes.bfloat16(1 / np.float32(ml_dtypes.bfloat16(w_dequant_scale)))
    w_scaled = (w.astype(ml_dtypes.bfloat16) * inverse).astype(np.float32)
    w_dequant_scale = np.float32(ml_dtypes.bfloat16(1 / np.float32(inverse)))
"""
ONE_BY_ONE = "            w_t, scale = split_ternary(w) or quantization.quantize_weights(w)\n"


def merged(*names: str) -> str:
    """The matrices of these names are quantised as one, and cut apart again."""
    return f"""            w_t, scale = quantization.quantize_weights(w)
            if name.endswith({names}):
                stored = [module.rpartition(".")[0] + "." + each + ".weight" for each in {names}]
                parts = [self.tensors.take(each, self.tensors.info(each).shape).astype(np.float32) for each in stored]
                w_t, scale = quantization.quantize_weights(np.concatenate(parts))
                start = sum(len(part) for part in parts[: {names}.index(name.rpartition(".")[2])])
                w_t = w_t[start : start + out_features]
"""


# fmt: off
LINEAR_BUGS = (
    # -- weight scales
    bug("scale_not_divided", "divided",
        OUT, (HF_FOLDER, "scale = np.float32(1.0) / scale", "pass"), cause="scale_inverted"),
    bug("scale_not_multiplied", "bitnet",
        OUT, (HF_FOLDER, '_scale_convention == "divide"', '_scale_convention == "multiply"'), cause="scale_inverted"),
    bug("scale_from_ternary_weights", "saved after quantisation",
        OUT, (HF_FOLDER, "split_ternary(w) or quantization", "quantization")),
    bug("masters_by_row", "masters", ACC, (QUANT, ABSMEAN, BY_ROW), (QUANT, PLANES, PLANES + ".reshape(-1)")),
    bug("masters_in_bfloat16", "masters", ACC, (QUANT, QUOTIENT, IN_BF16)),
    bug("masters_merged_qkv", "masters", ACC, (HF_FOLDER, ONE_BY_ONE, merged("q_proj", "k_proj", "v_proj"))),
    bug("masters_merged_gate_up", "masters",
        "blocks.0.mlp.gate_proj.hook_acc_int32 blocks.0.mlp.gate_proj.hook_out",
        (HF_FOLDER, ONE_BY_ONE, merged("gate_proj", "up_proj"))),
    bug("qkv_scales_by_thirds", "one kv head", OUT, (CHECKPOINT, LAYER_READ, THIRDS + LAYER_READ)),
    # -- layouts
    bug("i2s_bits_reversed", "bitnet", ACC, (HF_FOLDER, FROM_HF, I2S_WRITTEN + I2S_LOW_BITS_FIRST)),
    bug("i2s_x86_read_as_arm", "bitnet", ACC, (HF_FOLDER, FROM_HF, I2S_WRITTEN + I2S_AS_ARM)),
    bug("hf_rows_adjacent", "bitnet",
        ACC,
        (PACKING, "packed[first : first + len(block)]", "packed[4 * start + quarter : 4 * (start + len(block)) : 4]")),
    bug("hf_bits_reversed", "bitnet", ACC, (PACKING, "2 * quarter)", "2 * (3 - quarter))")),
    bug("qk_permuted", "bitnet", ACC, (CHECKPOINT, READ, READ + PERMUTE)),
    # -- activation quantisation
    bug("round_half_away", "exact ties", X_INT8, (QUANT, ROUNDED, AWAY)),
    bug("activation_scale_per_tensor", "bitnet",
        X_INT8, (QUANT, SCALE, "    largest = np.full((len(x), 1), np.abs(x).max())\n" + SCALE)),
    bug("activation_scale_of_128", "bitnet", X_INT8, (QUANT, SCALE, SCALE.replace("127", "128"))),
    bug("activation_scale_128_wraps", "bitnet",
        X_INT8,
        (QUANT, SCALE, SCALE.replace("127", "128")),
        (QUANT, CLIPPED, "np.rint(x * x_quant_scale).astype(np.int64)")),
    bug("activation_floor_missing", "faint token",
        X_INT8, (QUANT, "np.maximum(largest, x.dtype.type(SCALE_FLOOR))", "largest"), tokens=(5, 1, 17, 23, 5, 9)),
    bug("activation_blocks_of_256", "wide", "blocks.0.*_proj.hook_out", (WEIGHTS, PRODUCT, Q8_K), also="activation_scales_by_256"),
    bug("activations_not_quantised", "bitnet", OUT, (WEIGHTS, PRODUCT, DENSE)),
    # -- accumulators
    bug("int16_accumulators_wrap", "aligned sums",
        ACC, (QUANT, ACC_END, ACC_LINE + "    return acc.astype(np.int16).astype(np.int32)\n")),
    bug("int16_accumulators_saturate", "aligned sums",
        ACC, (QUANT, ACC_END, ACC_LINE + "    return np.minimum(np.maximum(acc, -32768), 32767)\n")),
    bug("bf16_accumulators", "bitnet", ACC, (QUANT, ACC_LINE, BF16)),
    bug("unsupported_shape_gives_zeros", "bitnet",
        "blocks.0.mlp.down_proj.hook_acc_int32", (QUANT, EXACT, REFUSED + EXACT)),
)
