"use strict";
// The model, one token at a time: the steps of chargpt/models/gpt.py with a KV cache.
// Shapes: L = layers, C = n_embd, H = heads, D = C / H, F = MLP width, K = block size, V = vocabulary
// size, S = cached tokens. A matrix is (outputs, inputs), row by row, as in PyTorch.
const N_TOP = 8;  // most likely tokens that are reported
const N_BEAMS = 15, WORDS_AHEAD = 2, TOKENS_AHEAD = 24;  // of suggestions: words or at most tokens
const SEPARATOR = 0, LETTER = 1, WHOLE_WORD = 2, APOSTROPHE = 3;  // kinds of tokens
const CHUNK_MS = 20;  // between two messages to the page, when those from it are received
const MAX_ATTENTION_BYTES = 1 << 27;  // of the attention weights that are kept, of the last tokens
let pageData, vocabulary, kinds, nextStates, nCharacters, weight, L, C, H, D, K, V, cos, sin, keys, values;
let tokens = [], attentionRows = [];  // all tokens read; {start, size = S, weights (L, H, S)} of each
let length = 0;  // cached tokens
let logits = null;  // of the next token, (V); null if the text has not begun
let state = 0;  // of the UTF-8 decoder, 0 between characters
let active = 0, searching = 0;  // ids of the requests that are answered

function load({ pageData: given, weights }) {
  pageData = given;
  ({ n_layer: L, n_embd: C, n_head: H, block_size: K } = pageData.model);
  vocabulary = [...pageData.tokenizer.characters];
  [D, V, nCharacters] = [C / H, pageData.vocab_size, vocabulary.length];
  kinds = Uint8Array.from({ length: V }, (_, token) => kindOf(token));  // (V)
  const nStates = 1 + Math.max(...pageData.transitions.map(([from]) => from));
  nextStates = Int8Array.from({ length: nStates * V }, (_, i) => stateAfter(Math.floor(i / V), i % V));  // (states, V)
  const table = Float32Array.from({ length: 1 << 16 }, (_, bits) => halfToFloat(bits));
  const bytes = atob(weights), all = new Float32Array(bytes.length / 2);
  for (let i = 0; i < all.length; i++) all[i] = table[bytes.charCodeAt(2 * i) | (bytes.charCodeAt(2 * i + 1) << 8)];
  weight = {};
  let at = 0;
  for (const [name, size] of pageData.tensors) weight[name] = all.subarray(at, (at += size));
  const angle = (_, i) => Math.floor(i / (D / 2)) * pageData.model.rope_theta ** (-2 * (i % (D / 2)) / D);
  const angles = Float64Array.from({ length: K * D / 2 }, angle);  // (K, D / 2)
  [cos, sin] = [Float32Array.from(angles, Math.cos), Float32Array.from(angles, Math.sin)];
  [keys, values] = [0, 1].map(() => Array.from({ length: L }, () => new Float32Array(K * C)));  // (L, K, C)
}

function halfToFloat(bits) {
  const sign = bits >> 15 ? -1 : 1, exponent = (bits >> 10) & 31, fraction = (bits & 1023) / 1024;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction) : 2 ** -14 * fraction);
}

function forward(token) {  // appends a token to the cache; returns the logits of the next one, (V)
  if (length === K) evictOldestHalf();
  const x = Float64Array.from(weight["embedding.weight"].subarray(token * C, (token + 1) * C));  // (C)
  const attentionRow = new Uint8Array(L * H * (length + 1));  // attention weights in 255ths
  for (let layer = 0; layer < L; layer++) {
    const of = (name) => weight[`blocks.${layer}.${name}.weight`];
    const a = norm(x, of("attention_norm"));
    const [q, k, v] = ["query", "key", "value"].map((name) => linear(of(`attention.${name}`), a));  // (C)
    rope(headNorm(q, of("attention.query_norm")), 0, length, 1);
    rope(headNorm(k, of("attention.key_norm")), 0, length, 1);
    keys[layer].set(k, length * C);
    values[layer].set(v, length * C);
    add(x, linear(of("attention.output"), attend(layer, q, attentionRow)));
    const m = norm(x, of("mlp_norm"));
    const gate = linear(of("mlp.gate"), m), up = linear(of("mlp.up"), m);  // (F)
    for (let i = 0; i < up.length; i++) up[i] *= gate[i] / (1 + Math.exp(-gate[i]));
    add(x, linear(of("mlp.down"), up));
  }
  length++;
  attentionRows.push({ start: tokens.length + 1 - length, size: length, weights: attentionRow });
  delete attentionRows[attentionRows.length - 1 - Math.floor(MAX_ATTENTION_BYTES / (L * H * K))];
  return linear(weight["head.weight"], norm(x, weight["norm.weight"]));
}

function linear(matrix, x) {  // four rows at once, so that each x[i] is read for four products
  const n = x.length, out = new Float64Array(matrix.length / n);
  let row = 0, at = 0;
  for (; row + 3 < out.length; row += 4, at += 4 * n) {
    let a = 0, b = 0, c = 0, d = 0;
    for (let i = 0, j = at; i < n; i++, j++) {
      const value = x[i];
      a += matrix[j] * value;
      b += matrix[j + n] * value;
      c += matrix[j + 2 * n] * value;
      d += matrix[j + 3 * n] * value;
    }
    out[row] = a; out[row + 1] = b; out[row + 2] = c; out[row + 3] = d;
  }
  for (; row < out.length; row++) for (let i = 0; i < n; i++) out[row] += matrix[at++] * x[i];
  return out;
}

function norm(x, scale, from = 0, out = new Float64Array(x.length)) {  // RMSNorm over scale.length channels
  let squares = 0;
  for (let i = 0; i < scale.length; i++) squares += x[from + i] ** 2;
  const inverse = 1 / Math.sqrt(squares / scale.length + pageData.norm_eps);
  for (let i = 0; i < scale.length; i++) out[from + i] = x[from + i] * inverse * scale[i];
  return out;
}

function headNorm(x, scale) {  // QK-norm of each head, in place, (H, D)
  for (let head = 0; head < H; head++) norm(x, scale, head * D, x);
  return x;
}

function rope(x, from, position, sign) {  // rotates channels i and i + D / 2 of each head, in place
  for (let head = 0; head < H; head++) {
    for (let i = 0; i < D / 2; i++) {
      const c = cos[position * D / 2 + i], s = sign * sin[position * D / 2 + i];
      const at = from + head * D + i, first = x[at], second = x[at + D / 2];
      x[at] = first * c - second * s;
      x[at + D / 2] = second * c + first * s;
    }
  }
}

function attend(layer, q, attentionRow) {  // attention over the S cached tokens, (C)
  const k = keys[layer], v = values[layer], S = length + 1;
  const out = new Float64Array(C), probs = new Float64Array(S);
  for (let head = 0; head < H; head++) {
    const channel = head * D;
    let max = -Infinity, sum = 0;
    for (let s = 0; s < S; s++) {
      let score = 0;
      for (let i = channel, j = s * C + channel; i < channel + D; i++, j++) score += q[i] * k[j];
      probs[s] = score / Math.sqrt(D);
      if (probs[s] > max) max = probs[s];
    }
    for (let s = 0; s < S; s++) sum += probs[s] = Math.exp(probs[s] - max);
    for (let s = 0; s < S; s++) {
      const prob = probs[s] / sum;
      attentionRow[(layer * H + head) * S + s] = Math.round(255 * prob);
      for (let i = channel, j = s * C + channel; i < channel + D; i++, j++) out[i] += prob * v[j];
    }
  }
  return out;
}

function evictOldestHalf() {  // and rotates the other keys back to positions from 0
  length = Math.floor(K / 2);
  for (const cached of [...keys, ...values]) cached.copyWithin(0, (K - length) * C);
  for (const k of keys) for (let s = 0; s < length; s++) rope(k, s * C, K - length, -1);
}

function add(x, y) {
  for (let i = 0; i < x.length; i++) x[i] += y[i];
}

function feed(token, isSampled) {  // appends a token; returns its surprisal in bits and the most likely ones
  const record = { index: tokens.length, token, isSampled, bits: null, top: [] };
  if (logits) {
    const probs = softmax(logits);
    [record.bits, record.top] = [-Math.log2(probs[token]), top(probs)];
  }
  logits = forward(token);
  tokens.push(token);
  state = Math.max(0, follow(state, token));
  return record;
}

function softmax(scores) {
  const probs = new Float64Array(V);
  let max = -Infinity, sum = 0;
  for (let token = 0; token < V; token++) if (scores[token] > max) max = scores[token];
  for (let token = 0; token < V; token++) sum += probs[token] = Math.exp(scores[token] - max);
  for (let token = 0; token < V; token++) probs[token] /= sum;
  return probs;
}

class Highest {  // the values with the `limit` highest keys, in descending order; of equal keys the first added
  constructor(limit) {
    [this.limit, this.keys, this.values] = [limit, [], []];
  }

  admits(key) {  // asked before a value is made, because few of the V tokens are admitted
    return this.keys.length < this.limit || key > this.keys[this.limit - 1];
  }

  add(key, value) {
    const lower = this.keys.findIndex((other) => key > other), place = lower < 0 ? this.keys.length : lower;
    this.keys.splice(place, 0, key);
    this.values.splice(place, 0, value);
    this.keys.length = this.values.length = Math.min(this.keys.length, this.limit);
  }
}

function top(probs) {  // [token, probability, may it come here], the most likely first
  const best = new Highest(N_TOP);
  for (let token = 0; token < V; token++) if (best.admits(probs[token])) best.add(probs[token], token);
  return best.values.map((token) => [token, probs[token], follow(state, token) >= 0]);
}

function follow(from, token) {  // the state of UTF-8 after a token, -1 where it may not come
  return nextStates[from * V + token];
}

function stateAfter(from, token) {  // that `follow` looks up
  const byte = token - nCharacters;
  if (byte < 0) return from === 0 ? 0 : -1;
  const value = pageData.bytes[byte];  // none for the unknown token
  const rule = pageData.transitions.find(([s, low, high]) => s === from && low <= value && value <= high);
  return rule ? rule[3] : -1;
}

function sample(scores, from, uniform, { temperature, topK }) {  // as chargpt/inference/generation.py
  let best = -1, sum = 0;
  for (let token = 0; token < V; token++) {
    if (follow(from, token) >= 0 && (best < 0 || scores[token] > scores[best])) best = token;
  }
  if (temperature === 0) return best;
  const probs = new Float64Array(V);
  for (let token = 0; token < V; token++) {
    if (follow(from, token) >= 0) probs[token] = Math.exp((scores[token] - scores[best]) / temperature);
  }
  if (topK < V) keepHighest(probs, topK);
  for (let token = 0; token < V; token++) sum += probs[token];
  let rest = uniform * sum;
  for (let token = 0; token < V; token++) if ((rest -= probs[token]) < 0) return token;
  return best;
}

function keepHighest(probs, k) {  // and sets the others to 0; of equal ones the first are kept
  const least = kthHighest(probs.slice(), k);
  let nEqual = k;
  for (let token = 0; token < V; token++) nEqual -= probs[token] > least;
  for (let token = 0; token < V; token++) {
    if (probs[token] < least || (probs[token] === least && nEqual-- <= 0)) probs[token] = 0;
  }
}

function kthHighest(numbers, k) {  // quickselect, which reorders them
  for (let low = 0, high = numbers.length - 1; low < high;) {
    const pivot = numbers[(low + high) >> 1];
    let i = low, j = high;
    while (i <= j) {
      while (numbers[i] > pivot) i++;
      while (numbers[j] < pivot) j--;
      if (i <= j) [numbers[i++], numbers[j--]] = [numbers[j], numbers[i]];
    }
    if (k - 1 <= j) high = j;
    else if (k - 1 >= i) low = i;
    else break;
  }
  return numbers[k - 1];
}

function uniform(seed, index) {  // in [0, 1), a hash of both (the finaliser of MurmurHash3)
  const mix = (bits) => {
    bits = Math.imul(bits ^ (bits >>> 16), 0x85ebca6b);
    bits = Math.imul(bits ^ (bits >>> 13), 0xc2b2ae35);
    return (bits ^ (bits >>> 16)) >>> 0;
  };
  return mix(mix(seed) + index + 1) / 2 ** 32;
}

function rewind(prompt) {  // keeps what the cache shares with a prompt; returns the index of the next token
  let common = 0;
  while (common < prompt.length && prompt[common] === tokens[common]) common++;
  const isWhole = tokens.length === length;  // nothing was evicted or left out
  if (common > 0 && common === tokens.length) return common;
  // the cache cannot go back beyond an eviction; the last common token is read again for its logits
  length = isWhole && prompt.length <= K && common > 1 ? common - 1 : 0;
  let first = length;
  if (!length) {
    first = Math.max(0, prompt.length - K);
    const whole = prompt.slice(first).findIndex((token) => token < pageData.first_continuation_id);
    first += Math.max(0, whole);
  }
  tokens = prompt.slice(0, first);
  attentionRows.length = first;
  state = tokens.reduce((from, token) => Math.max(0, follow(from, token)), 0);
  // without a text to start from, the first character has its frequency in the training split
  logits = !first && pageData.counts ? Float64Array.from(pageData.counts, Math.log) : null;
  if (length) feed(prompt[first++], false);
  return first;
}

function* generate(request) {  // prefill, then sampling; yields the record of a token or nothing; returns what the end shows
  for (let i = rewind(request.tokens); i < request.tokens.length; i++) yield feed(request.tokens[i], false);
  for (let count = 0; count < request.length; count += state === 0) {
    const scores = logits ?? new Float64Array(V);
    const token = sample(scores, state, uniform(request.seed, tokens.length), request);
    if (token === pageData.eos_token_id) break;  // the document ends
    yield feed(token, true);
  }
  const next = logits ? top(softmax(logits)) : [];
  return { next, bigram: pageData.bigram && request.length ? yield* generateBigram(request) : null };
}

function* generateBigram(request) {  // yields after each token; returns the tokens by the bigram of the training split
  const found = [];
  let last = request.tokens.at(-1), from = 0;
  for (let count = 0; count < request.length; count += from === 0) {
    const scores = new Float64Array(V).fill(Math.log(pageData.bigram.alpha)), row = pageData.bigram.rows[last] ?? [];
    for (let i = 0; i < row.length; i += 2) scores[row[i]] = Math.log(row[i + 1] + pageData.bigram.alpha);
    last = sample(scores, from, uniform(request.seed, request.tokens.length + found.length), request);
    if (last === pageData.eos_token_id) break;
    found.push(last);
    from = follow(from, last);
    yield;
  }
  return found;
}

// --- suggestions: beam search for the most probable words ahead, on a copy of the state

function kindOf(token) {
  const character = token < nCharacters ? vocabulary[token] : "a";  // bytes spell letters, mostly
  if (/[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}]/u.test(character)) return WHOLE_WORD;
  return /[\p{L}\p{M}\p{N}_]/u.test(character) ? LETTER : "'\u2019".includes(character) ? APOSTROPHE : SEPARATOR;
}

function* search({ tokens: prompt, excluded, count }) {  // yields between passes over the model or the vocabulary; returns {tokens, prob}
  for (let i = rewind(prompt); i < prompt.length; i++) yield feed(prompt[i], false);
  if (K - length < Math.min(TOKENS_AHEAD, Math.floor(K / 2))) {  // read half a block anew, to make room
    const half = prompt.slice(-Math.floor(K / 2)), whole = half.findIndex((token) => token < pageData.first_continuation_id);
    [length, tokens, state] = [0, [], 0];
    for (const token of half.slice(Math.max(0, whole))) yield feed(token, false);
  }
  const start = length, found = new Highest(count);
  const complete = (of, logProb) => {
    if (of.length && !excluded.includes(of.join())) found.add(logProb, of);
  };
  let beams = logits ? [{ tokens: [], logProb: 0, words: 0, isInWord: false, state, scores: logits, rows: [] }] : [];
  for (let ahead = 0; beams.length; ahead++) {
    const longer = new Highest(N_BEAMS);
    for (const beam of beams) {
      extend(beam, longer, found, complete);
      yield;
    }
    if (!longer.keys.length || !found.admits(longer.keys[0])) break;
    if (ahead === Math.min(TOKENS_AHEAD, K - start)) {
      for (const { tokens: of, logProb } of beams) complete(of, logProb);
      break;
    }
    for (const each of longer.values) {
      each.rows.forEach((row, i) => [...keys, ...values][i].set(row, start * C));
      length = start + ahead;
      each.scores = forward(each.tokens.at(-1));
      attentionRows.pop();
      each.rows = [...keys, ...values].map((cached) => cached.slice(start * C, length * C));
      yield;
    }
    beams = longer.values;
  }
  return found.values.map((of, i) => ({ tokens: of, prob: Math.exp(found.keys[i]) }));
}

function extend(beam, longer, found, complete) {  // adds the beams one token longer, and completes those whose words end
  const probs = softmax(beam.scores.map((score, token) => follow(beam.state, token) >= 0 ? score : -Infinity));
  let ending = 0;
  for (let token = 0; token < V; token++) {
    if (!probs[token]) continue;
    const kind = kinds[token], isLetter = kind === LETTER || (kind === APOSTROPHE && beam.isInWord);
    if (token === pageData.eos_token_id || (beam.isInWord && beam.words === WORDS_AHEAD && !isLetter)) {
      ending += probs[token];
      continue;
    }
    const words = beam.words + (kind === WHOLE_WORD || (isLetter && !beam.isInWord));
    const isComplete = kind === WHOLE_WORD && words === WORDS_AHEAD, logProb = beam.logProb + Math.log(probs[token]);
    if (!(isComplete ? found : longer).admits(logProb)) continue;
    const of = [...beam.tokens, token];
    if (isComplete) complete(of, logProb);
    else longer.add(logProb, { ...beam, tokens: of, logProb, words, isInWord: isLetter, state: follow(beam.state, token) });
  }
  if (ending) complete(beam.tokens, beam.logProb + Math.log(ending));
}

function exchange(other) {  // the state for another; returns the one before
  const before = { keys, values, tokens, attentionRows, length, logits, state };
  ({ keys, values, tokens, attentionRows, length, logits, state } = other);
  return before;
}

async function suggest(request) {
  searching = request.suggest;
  const steps = search(request), pause = newPause(), copies = (arrays) => arrays.map((each) => each.slice());
  let own = { keys: copies(keys), values: copies(values), tokens: tokens.slice(), attentionRows: [], length, logits, state };
  while (searching === request.suggest) {
    const others = exchange(own), end = performance.now() + CHUNK_MS;
    let step = steps.next();
    while (!step.done && performance.now() < end) step = steps.next();
    own = exchange(others);
    if (step.done) {
      postMessage({ suggest: request.suggest, found: step.value });
      return;
    }
    await pause();
  }
}

function newPause() {  // a function whose promise lets the page's messages in
  const channel = new MessageChannel();
  return () => new Promise((resolve) => { channel.port1.onmessage = resolve; channel.port2.postMessage(0); });
}

async function run(request) {
  [active, searching] = [request.id, 0];
  const records = generate(request), pause = newPause();
  for (let isDone = false; !isDone && active === request.id; await pause()) {
    const batch = [], end = performance.now() + CHUNK_MS;
    let step = {};
    while (!step.done && performance.now() < end) {
      step = records.next();
      if (!step.done && step.value) batch.push(step.value);
    }
    isDone = Boolean(step.done);
    postMessage({ id: request.id, batch, isDone, ...(isDone && step.value) });
  }
}

onmessage = ({ data }) => {
  if (data.weights) load(data);
  else if (data.suggest) suggest(data);
  else if (data.tokens) run(data);
  else postMessage({ attention: data.attention, ...attentionRows[data.attention] });
};
