"use strict";
const element = (id) => document.getElementById(id);
const pageData = JSON.parse(element("page-data").textContent);
const vocabulary = [...pageData.tokenizer.characters], ids = new Map(vocabulary.map((character, id) => [character, id]));
const byteIds = new Map(pageData.bytes.map((byte, index) => [byte, vocabulary.length + index]));
const graphemes = new Intl.Segmenter(undefined, { granularity: "grapheme" }), utf8 = new TextDecoder();
const form = element("form"), prompt = element("prompt"), view = element("view"), end = element("end");
prompt.value = pageData.prompt;
let tokens = [], prefixLength = 0;  // what the model reads; how many at the start are not part of the text
let records = [];  // surprisal and predictions of each token, as the worker reports them
let spans = [], owners = [];  // graphemes as {node, from, to}; the one of each token
let at = null, isPinned = false;  // the chosen token, null for the next one; whether the pointer chooses no other
let next = [], attention = null;  // predictions of the next token; attention weights of the chosen one
let request = 0, isWriting = false, isPreview = false, began = 0, timer = 0, session = newSeed();
let suggestion = 0, suggestedFor = 0;  // requests for suggestions: the last one, and that of those shown
let suggested = [], excluded = [];  // those shown, and those before them
const earlier = [];  // texts before the suggestions and continuations that were added
let written = "", writtenFrom = 0;  // the text that the model last put into the field, and its first new token

const N_SUGGESTIONS = 5;
const source = new Blob([element("worker").textContent], { type: "text/javascript" });
const worker = new Worker(URL.createObjectURL(source));
worker.postMessage({ pageData, weights: element("weights").textContent });
element("weights").remove();

function newSeed() {
  return crypto.getRandomValues(new Uint32Array(1))[0];
}

// --- text and tokens

function encode(text) {
  const found = [], missing = new Set();
  for (const character of text) {
    if (ids.has(character)) found.push(ids.get(character));
    else if (byteIds.size) {
      for (const byte of new TextEncoder().encode(character)) found.push(byteIds.get(byte));
    } else {
      missing.add(character);
      if (pageData.tokenizer.unknown) found.push(vocabulary.length);
    }
  }
  return [found, missing];
}

function characters(ofTokens, from) {  // {text, from, to}, byte tokens joined; an unfinished one is left out
  const found = [];
  let bytes = [];
  for (let i = from; i < ofTokens.length; i++) {
    const byte = pageData.bytes[ofTokens[i] - vocabulary.length];
    if (byte === undefined) found.push({ text: vocabulary[ofTokens[i]] ?? "\ufffd", from: i, to: i + 1 });
    else if (bytes.push(byte) === byteCount(bytes[0])) {
      found.push({ text: utf8.decode(Uint8Array.from(bytes)), from: i + 1 - bytes.length, to: i + 1 });
      bytes = [];
    }
  }
  return found;
}

function byteCount(first) {  // of a character's UTF-8 form
  return first < 0x80 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
}

function textOf(ofTokens, from = 0) {
  return characters(ofTokens, from).map((each) => each.text).join("");
}

const FORMATS = /[\xad\u061c\u200b\u200e\u200f\u2060-\u2064\ufeff]/;  // as in chargpt/text/display.py

function displayChar(character) {  // of one that is invisible, or would join its neighbours
  const signs = { "\n": "\u23ce", "\t": "\u21e5", "\x1e": "\u25a0", "\u200d": "ZWJ", "\ufe0f": "VS16" };
  if (/^\p{M}$/u.test(character)) return signs[character] ?? `\u25cc${character}`;
  if (character < " ") return signs[character] ?? String.fromCharCode(0x2400 + character.charCodeAt(0));
  if (FORMATS.test(character)) return character;  // which is shown as its code
  return signs[character] ?? (/^[\p{C}\p{Zl}\p{Zp}]$/u.test(character) ? "\ufffd" : character);
}

function shown(segment) {  // a grapheme as it is displayed
  if (segment === "\r\n") return "\u23ce\n";
  return [...segment].length > 1 ? segment : displayChar(segment) + (segment === "\n" ? "\n" : "");
}

function name(token) {
  const byte = pageData.bytes[token - vocabulary.length];
  if (byte >= 0x80) return `byte ${byte.toString(16).toUpperCase()}`;
  const character = byte === undefined ? vocabulary[token] : String.fromCharCode(byte);
  if (character === undefined) return "unknown";
  return { " ": "space", "\n": "line end", "\t": "tab" }[character] ?? displayChar(character);
}

function isolated(words) {  // so that their direction does not change the sentence around them
  const node = document.createElement("bdi");
  node.append(...nodesOf(words));
  return node;
}

function nodesOf(words) {  // nodes that draw control and format characters by name, because fonts lack their signs
  return words.split(new RegExp(`([\\u2400-\\u241f]|${FORMATS.source})`)).map((part, index) => {
    if (index % 2 === 0) return part;
    const node = document.createElement("i"), code = part.charCodeAt(0);
    node.className = "sign";
    node.dataset.name = FORMATS.test(part) ? `U+${code.toString(16).toUpperCase().padStart(4, "0")}` : pageData.control_names[code - 0x2400];
    node.textContent = part;
    return node;
  });
}

// --- the text as graphemes

function draw(from) {  // those of the tokens from an index on; the one before may grow
  while (spans.length && spans.at(-1).to > from) spans.pop().node.remove();
  spans.pop()?.node.remove();
  owners.length = spans.at(-1)?.to ?? prefixLength;
  const found = characters(tokens, owners.length);
  let which = 0;
  for (const { segment } of graphemes.segment(found.map((each) => each.text).join(""))) {
    const span = { node: document.createElement("span"), from: found[which].from, to: 0 };
    for (let size = 0; size < segment.length; which++) {
      size += found[which].text.length;
      span.to = found[which].to;
    }
    span.node.append(...nodesOf(shown(segment)));
    span.node.dataset.token = span.from;
    for (let token = span.from; token < span.to; token++) owners[token] = span;
    spans.push(span);
    end.before(span.node);
    shade(span);
  }
  end.dataset.token = tokens.length;
}

function shade(span) {
  const own = records.slice(span.from, span.to).filter((record) => record);
  const sampled = own.filter((record) => record.isSampled);
  const bits = Math.max(0, ...own.map((record) => record.bits ?? 0));
  const level = pageData.thresholds.filter((least) => bits >= least).length;
  span.node.className = `s${level} ${sampled.length ? (sampled[0].isPreview ? "preview" : "") : "typed"}`;
}

// --- requests to the model

function read(given, length, { isPreview: preview = false, seed = 0 } = {}) {
  let common = 0;
  while (common < given.length && given[common] === tokens[common]) common++;
  tokens = given.slice();
  records.length = Math.min(records.length, common);
  for (const record of records) if (record?.isPreview) record.isSampled = false;  // it was typed since
  next = [];
  staleSuggestions();
  isPreview = preview;
  draw(common);
  spans.forEach(shade);
  if (at !== null && at > common) choose(null);
  const temperature = Number(element("temperature").value), topK = Number(element("top-k").value) || Infinity;
  worker.postMessage({ id: ++request, tokens, length, temperature, topK, seed });
}

function promptTokens() {  // and says which characters are not in the vocabulary
  const lineEnd = pageData.tokenizer.crlf ? "\r\n" : ids.has("\r") && !ids.has("\n") ? "\r" : "\n";  // of the training text; that of a field is LF
  const text = written.replace(/\r\n?/g, "\n") === prompt.value ? written : prompt.value.replaceAll("\n", lineEnd);
  const isLonger = prefixLength && written && text.startsWith(written);  // the field extends a text that was generated without a prompt
  const start = isLonger || !text ? pageData.bos_text : pageData.tokenizer.eos_token ?? "";
  prefixLength = [...start].length;
  const [found, missing] = encode(start + text);
  const names = [...missing].slice(0, 5).map((character) => `\u2068${character === " " ? "space" : displayChar(character)}\u2069`).join(", ");
  const done = pageData.tokenizer.unknown ? "read as unknown" : "left out", others = missing.size > 5 ? " and others" : "";
  element("missing").textContent = missing.size ? `Not in the vocabulary and ${done}: ${names}${others}.` : "";
  return found;
}

function seedOf() {
  const field = element("seed").value;
  return field === "" ? session : Number(field);
}

function write(given) {  // continues a text
  if (!element("live").checked) session = newSeed();
  clearTimeout(timer);
  timer = 0;
  [began, writtenFrom, isPinned] = [performance.now(), given.length, false];
  setWriting(true);
  say("Writing \u2026");
  choose(null);
  read(given, Number(element("length").value), { seed: seedOf() });
}

function readTyped() {  // the field has changed
  timer = 0;
  isPinned = false;
  choose(null);
  const isLive = element("live").checked && form.checkValidity();
  const length = isLive ? Number(element("length").value) : 0;
  read(promptTokens(), length, { isPreview: true, seed: seedOf() });
}

function stop() {
  if (!isWriting) return;
  setWriting(false);
  say("Stopped.");
  read(tokens.slice(0, characters(tokens, 0).at(-1)?.to ?? 0), 0);
}

function setWriting(value) {
  isWriting = value;
  element("stop").disabled = !value;
  view.setAttribute("aria-busy", value);
}

function say(words) {
  element("status").textContent = words;
}

worker.onmessage = ({ data }) => {
  if (data.suggest) {
    if (data.suggest === suggestion) showSuggestions(data);
    return;
  }
  if (data.attention !== undefined) { showAttention(data); return; }
  const isAtEnd = view.scrollHeight - view.scrollTop - view.clientHeight < 40, first = tokens.length;
  const isCurrent = data.id === request;
  for (const record of data.batch) {
    const { index, token } = record, before = records[index];
    // what an earlier request has read is not read again
    if (!isCurrent && (before || tokens[index] !== token)) continue;
    tokens[index] = token;
    record.isPreview = record.isSampled && isPreview;
    record.isSampled ||= before?.isSampled;
    records[index] = record;
    if (index < first && owners[index]) shade(owners[index]);
  }
  if (!isCurrent) return;
  if (tokens.length > first) draw(first);
  if (isAtEnd) view.scrollTop = view.scrollHeight;
  if (!isPreview) showText();
  if (data.batch.some((record) => record.index === at)) choose(at);
  if (data.isDone) finish(data);
};
worker.onerror = () => say("This browser does not run the model; another one may.");

function showText() {  // in the field
  written = textOf(tokens, prefixLength);
  prompt.value = written;
  prompt.scrollTop = prompt.scrollHeight;
}

function finish({ next: likely, bigram }) {
  next = likely;
  if (bigram) {
    const segments = [...graphemes.segment(textOf(bigram))].map((each) => shown(each.segment));
    element("bigram-text").replaceChildren(...nodesOf(segments.join("")));
  }
  if (isWriting) {
    const seconds = (performance.now() - began) / 1000, sampled = records.slice(writtenFrom);
    const bits = sampled.reduce((sum, record) => sum + (record.bits ?? 0), 0);
    const count = characters(tokens, writtenFrom).length;
    const speed = `${count} character${count === 1 ? "" : "s"} in ${seconds.toFixed(2)} s, ${Math.round(count / seconds)} per second`;
    const surprisal = `${(bits / count).toFixed(2)} bits per character`;
    say(count ? `${speed}; ${surprisal}; seed ${seedOf()}.` : "The document ends here.");
    setWriting(false);
  }
  if (at === null || at === tokens.length) choose(at);
  if (!timer) askSuggestions();  // else the field has changed since
}

// --- suggestions: the most probable words ahead

function askSuggestions(without = []) {
  excluded = without;
  element("searching").hidden = false;
  worker.postMessage({ suggest: ++suggestion, tokens: promptTokens(), excluded, count: N_SUGGESTIONS });
}

function staleSuggestions() {  // those of another text are not wanted
  suggestion++;
  element("searching").hidden = true;
  for (const button of element("suggestions").children) button.disabled = button !== document.activeElement;
}

function showSuggestions({ suggest, found }) {
  const hadFocus = element("suggestions").contains(document.activeElement);
  [suggested, suggestedFor] = [found, suggest];
  element("searching").hidden = true;
  const buttons = found.map(({ tokens: of, prob }) => {
    const button = document.createElement("button"), words = textOf(of);
    button.type = "button";
    button.style.setProperty("--prob", `${100 * prob}%`);
    const shown = [...words].map((each) => each === " " ? each : displayChar(each)).join("").trim();
    const isRest = /[\p{L}\p{N}]$/u.test(prompt.value) && /^[\p{L}\p{N}]/u.test(words);  // of a word
    button.append(isolated((isRest ? "\u2026" : "") + shown), prob < 0.001 ? " under 0.1%" : ` ${(100 * prob).toFixed(1)}%`);
    button.addEventListener("click", () => suggestedFor === suggestion && replaceText(prompt.value + words));
    return button;
  });
  element("suggestions").replaceChildren(...buttons);
  element("others").disabled = !found.length && !excluded.length;
  if (hadFocus) (buttons[0] ?? prompt).focus();
}

function replaceText(text) {
  earlier.push(prompt.value);
  setText(text);
}

function setText(text) {
  prompt.value = text;
  prompt.scrollTop = prompt.scrollHeight;
  element("undo").disabled = !earlier.length;
  clearTimeout(timer);
  readTyped();
}

function saveText() {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([prompt.value], { type: "text/plain" }));
  link.download = "text.txt";
  link.click();
  URL.revokeObjectURL(link.href);
}

// --- predictions and attention of one token

function choose(token) {  // null: the next one
  at = token;
  view.querySelector(".at")?.classList.remove("at");
  const index = at ?? tokens.length;
  if (at !== null) (owners[at] && at < tokens.length ? owners[at].node : end).classList.add("at");
  const record = index < tokens.length ? records[index] : { top: next };
  const summary = document.createElement("p"), list = document.createElement("div");
  summary.append(...describe(index, record));
  list.className = "alternatives";
  for (const [other, prob, mayCome] of record?.top ?? []) {
    const button = document.createElement("button");
    button.type = "button";
    button.disabled = !mayCome || other === pageData.eos_token_id;
    button.style.setProperty("--prob", `${100 * prob}%`);
    button.setAttribute("aria-pressed", other === record.token);
    button.append(isolated(name(other)), ` ${(100 * prob).toFixed(1)}%`);
    button.addEventListener("click", () => branch(index, other));
    list.append(button);
  }
  element("predictions").replaceChildren(summary, list);
  if (list.children.length) element("panel").hidden = false;  // and stays, so that nothing jumps while one types
  askAttention(index);
}

function describe(index, record) {
  if (index >= tokens.length && next.length) return ["Next character, most likely:"];
  if (index >= tokens.length) return [isWriting ? "The model is writing." : "No prediction yet."];
  const named = isolated(name(tokens[index]));
  if (!record) return [named, ": not within the context of the model."];
  if (record.bits === null) return [named, ": the model read nothing before it."];
  const percent = (100 * 2 ** -record.bits).toFixed(1);
  return [named, `: ${record.bits.toFixed(2)} bits (${percent}%); most likely here:`];
}

function branch(index, token) {
  write([...tokens.slice(0, index), token]);
  choose(index);
  view.focus({ preventScroll: true });
}

function askAttention(index) {  // of the token before, which predicts this one
  attention = null;
  showWeights();
  if (index > 0 && (index < tokens.length || next.length)) worker.postMessage({ attention: index - 1 });
}

function showAttention(answer) {
  if (answer.attention !== (at ?? tokens.length) - 1) return;
  attention = answer.weights ? answer : null;
  showWeights();
}

function showWeights() {  // of each grapheme, the mean over the selected layers and heads
  for (const { node } of spans) node.style.removeProperty("--weight");
  const perSpan = new Map(), [layer, head] = [element("layer").value, element("head").value];
  const { n_layer: layers, n_head: heads } = pageData.model, { start, size, weights } = attention ?? { size: 0 };
  const rows = Array.from({ length: layers * heads }, (_, row) => row).filter((row) =>
    (layer === "" || Math.floor(row / heads) === Number(layer)) && (head === "" || row % heads === Number(head)));
  for (let s = 0; s < size; s++) {
    const span = start + s >= prefixLength ? owners[start + s] : undefined;
    const sum = rows.reduce((total, row) => total + weights[row * size + s] / 255, 0);
    if (span) perSpan.set(span, (perSpan.get(span) ?? 0) + sum / rows.length);
  }
  const sorted = [...perSpan].sort(([, a], [, b]) => b - a), max = sorted[0]?.[1] || 1;
  for (const [{ node }, weight] of sorted) node.style.setProperty("--weight", weight / max);
  const named = ({ node, from, to }) => to - from > 1 ? node.textContent : name(tokens[from]);
  const words = sorted.slice(0, 3).flatMap(([span, weight], place) =>
    [place ? ", " : "", isolated(named(span)), ` ${Math.round(100 * weight)}%`]);
  element("attention-words").replaceChildren(...words);
}

// --- input

function move(step) {
  choose(Math.max(prefixLength, Math.min(tokens.length, (at ?? tokens.length) + step)));
  view.querySelector(".at")?.scrollIntoView({ block: "nearest" });
}

for (const kind of ["pointerover", "click"]) {
  view.addEventListener(kind, (event) => {
    const token = event.target.dataset.token;
    if (kind === "pointerover" && (isPinned || isWriting || token === undefined)) return;
    isPinned = token !== undefined && kind === "click";
    choose(token === undefined ? null : Number(token));
  });
}
view.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const steps = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
  if (event.key in steps) move(steps[event.key]);
  else if (["ArrowDown", "Enter"].includes(event.key)) element("predictions").querySelector("button:enabled")?.focus();
  else return;
  isPinned = true;
  event.preventDefault();
});
element("predictions").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  const all = [...element("predictions").querySelectorAll("button:enabled")];
  if (!step) return;
  (all[all.indexOf(event.target) + step] ?? view).focus();
  event.preventDefault();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    form.requestSubmit();
    event.preventDefault();
  }
});
// read out only what is chosen by keys, not every prediction while typing
view.addEventListener("focus", () => element("predictions").setAttribute("aria-live", "polite"));
view.addEventListener("blur", () => element("predictions").setAttribute("aria-live", "off"));
form.addEventListener("submit", (event) => {
  event.preventDefault();
  earlier.push(prompt.value);
  element("undo").disabled = false;
  write(promptTokens());
});
element("stop").addEventListener("click", stop);
// after the last ones, the first again
element("others").addEventListener("click", () => askSuggestions(suggested.length ? [...excluded, ...suggested.map((each) => each.tokens.join())] : []));
element("undo").addEventListener("click", () => setText(earlier.pop()));
element("save").addEventListener("click", saveText);
for (const id of ["layer", "head"]) element(id).addEventListener("change", showWeights);
element("temperature").addEventListener("input", showTemperature);
function showTemperature() {
  element("temperature-value").textContent = Number(element("temperature").value).toFixed(2);
}
form.addEventListener("input", (event) => {
  const isText = event.target === prompt;
  if (isText) staleSuggestions();
  if (isText && isWriting) {
    request++;  // what the model still writes is not wanted
    setWriting(false);
    say("Stopped.");
  }
  if (!isText && !element("live").checked && event.target.id !== "live") return;
  clearTimeout(timer);
  timer = setTimeout(readTyped, 120);
});
showTemperature();
readTyped();
