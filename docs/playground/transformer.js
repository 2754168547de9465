// BitNet b1.58 and LLaMA, one token at a time, as bitnet_ref/reference computes them: numbers are float32, and sums before
// an int8 rounding are float64, rounded once, so that the integers are the package's.

const round = Math.fround, FLOOR = round(1e-5), NOT_FINITE = "The model computed a number that is not finite.";

export class Transformer {
  // parts: of files.js: config, and by our names "embedding", "lm_head", norms (Float32Array) and linears
  constructor(config, parts, matrices) {
    Object.assign(this, { config, parts, matrices });
    this.clear();
  }

  clear() {
    this.position = 0;
    this.keys = Array.from({ length: this.config.layers }, () => []); // of each layer, of each token (kvHeads * headSize)
    this.values = this.keys.map(() => []);
  }

  // The logits after one more token.   -> (vocabulary)
  read(id) {
    const { config, parts } = this, { hidden, layers } = config;
    if (!(Number.isInteger(id) && id >= 0 && id < config.vocabulary)) throw new Error(`Token ${id}: the model knows 0 to ${config.vocabulary - 1}.`);
    let x = tableRow(parts.embedding, id, hidden);
    for (let i = 0; i < layers; i++) {
      x = sum(x, this.attention(x, i));
      x = sum(x, this.feedForward(x, i));
    }
    this.position += 1;
    const logits = this.linear(rmsNorm(x, parts.final_norm, config.eps), "lm_head");
    if (!logits.every(Number.isFinite)) throw new Error(NOT_FINITE);
    return logits;
  }

  attention(x, layer) {
    const { config, parts, position } = this, { heads, kvHeads, headSize, eps, theta } = config, name = `blocks.${layer}.attn`;
    const shared = { x: rmsNorm(x, parts[`blocks.${layer}.attn_norm`], eps) };
    const [q, k, v] = ["q_proj", "k_proj", "v_proj"].map((part) => this.linear(shared.x, `${name}.${part}`, shared));
    for (const [each, norm] of [[q, "q_norm"], [k, "k_norm"]]) {
      const weight = parts[`blocks.${layer}.${norm}`]; // Qwen3 has them
      for (let at = 0; at < each.length; at += headSize) {
        const head = each.subarray(at, at + headSize);
        if (weight) head.set(rmsNorm(head, weight, eps));
        turn(head, position, theta);
      }
    }
    const keys = this.keys[layer], values = this.values[layer], z = new Float32Array(heads * headSize);
    keys.push(k);
    values.push(v);
    for (let head = 0; head < heads; head++) {
      const own = head * headSize, theirs = Math.floor((head * kvHeads) / heads) * headSize;
      const pattern = softmax(keys.map((key) => {
        let score = 0;
        for (let j = 0; j < headSize; j++) score += q[own + j] * key[theirs + j];
        return round(score * headSize ** -0.5);
      }));
      for (let j = 0; j < headSize; j++) z[own + j] = pattern.reduce((total, share, i) => total + share * values[i][theirs + j], 0);
    }
    const subNorm = parts[`blocks.${layer}.attn_sub_norm`];
    return this.linear(subNorm ? rmsNorm(z, subNorm, eps) : z, `${name}.o_proj`);
  }

  feedForward(x, layer) {
    const { config, parts } = this, name = `blocks.${layer}.mlp`, act = config.activation === "relu2" ? relu2 : silu;
    const shared = { x: rmsNorm(x, parts[`blocks.${layer}.ffn_norm`], config.eps) };
    const gate = this.linear(shared.x, `${name}.gate_proj`, shared), up = this.linear(shared.x, `${name}.up_proj`, shared);
    const h = gate.map((value, i) => act(value) * up[i]), subNorm = parts[`blocks.${layer}.ffn_sub_norm`];
    return this.linear(subNorm ? rmsNorm(h, subNorm, config.eps) : h, `${name}.down_proj`);
  }

  // shared: what linears of one input share, its quantised form
  linear(x, name, shared = {}) {
    const weight = this.parts[name], { bias } = weight;
    let y;
    if (weight.matrix) {
      shared.int8 ??= quantize(x);
      const [integers, scale] = shared.int8, factor = round(weight.scale / scale);
      y = Float32Array.from(this.matrices.product(weight.matrix, integers), (acc) => acc * factor);
    } else y = weight.group ? groupedProduct(weight, x) : denseProduct(weight, x);
    return bias ? sum(y, bias) : y;
  }
}

const sum = (x, y) => x.map((value, i) => value + y[i]);

function rmsNorm(x, weight, eps) {
  const square = x.reduce((total, value) => total + value * value, 0);
  if (!Number.isFinite(square)) throw new Error(NOT_FINITE);
  const length = round(Math.sqrt(square / x.length + eps));
  return x.map((value, i) => round(value / length) * weight[i]);
}

// Absmax: x is near integers / scale.
function quantize(x) {
  const scale = round(127 / Math.max(x.reduce((most, value) => Math.max(most, Math.abs(value)), 0), FLOOR));
  return [Int8Array.from(x, (value) => roundHalfToEven(round(value * scale))), scale];
}

export function roundHalfToEven(value) {
  const up = Math.round(value); // half up
  return up - value === 0.5 && up % 2 ? up - 1 : up;
}

// RoPE: numbers j and j + d/2 of a head are turned together.
function turn(head, position, theta) {
  const half = head.length / 2;
  for (let j = 0; j < half; j++) {
    const angle = position * theta ** (-j / half), cos = round(Math.cos(angle)), sin = round(Math.sin(angle));
    const [a, b] = [head[j], head[j + half]];
    head[j] = round(a * cos) - round(b * sin);
    head[j + half] = round(b * cos) + round(a * sin);
  }
}

function softmax(scores) {
  const largest = scores.reduce((a, b) => Math.max(a, b)), powers = scores.map((score) => Math.exp(score - largest));
  const total = powers.reduce((a, b) => a + b);
  return powers.map((power) => round(power / total));
}

const relu2 = (value) => (value > 0 ? round(value * value) : 0);

function silu(value) {
  const e = Math.exp(-Math.abs(value));
  return round((value * (value >= 0 ? 1 : e)) / (1 + e));
}

function denseProduct({ values, rows, columns }, x) {
  const y = new Float32Array(rows);
  for (let row = 0, at = 0; row < rows; row++) {
    let total = 0;
    for (let i = 0; i < columns; i++) total += values[at++] * x[i];
    y[row] = total;
  }
  return y;
}

// Ternary with a scale for each group of a row: the inputs stay floats.
function groupedProduct({ codes, scales, group, rows, columns }, x) {
  const y = new Float32Array(rows), groups = Math.ceil(columns / group);
  for (let row = 0; row < rows; row++) {
    let total = 0;
    for (let i = 0; i < groups; i++) {
      let part = 0;
      const end = Math.min(columns, (i + 1) * group);
      for (let j = i * group; j < end; j++) part += (codes[row * columns + j] - 1) * x[j];
      total += scales[row * groups + i] * part;
    }
    y[row] = total;
  }
  return y;
}

function tableRow({ values, codes, scales, group }, row, columns) {
  if (!group) return values.slice(row * columns, (row + 1) * columns);
  const groups = Math.ceil(columns / group);
  return Float32Array.from({ length: columns }, (_, i) => (codes[row * columns + i] - 1) * scales[row * groups + Math.floor(i / group)]);
}
