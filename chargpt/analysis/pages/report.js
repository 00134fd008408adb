"use strict";
const passage = document.getElementById("passage"), out = document.getElementById("top-characters");
const spans = [...passage.querySelectorAll("span")];
const predictions = JSON.parse(document.getElementById("predictions").textContent);
let at = -1;
function show(index) {
  if (index < 0 || index >= spans.length) return;
  if (at >= 0) spans[at].classList.remove("at");
  at = index;
  spans[at].classList.add("at");
  out.replaceChildren(...predictions[at].map(describe));
}
function isolated(character) {  // so that one written to the left does not move the numbers
  const node = document.createElement("bdi");
  node.textContent = character;
  return node;
}
function describe([target, bits, top]) {
  const list = document.createElement("ol");
  for (const [character, prob] of top) {
    const item = document.createElement("li");
    item.append(isolated(character), `  ${(100 * prob).toFixed(1)}%`);
    list.append(item);
  }
  const summary = document.createElement("p"), entry = document.createElement("div");
  summary.append(isolated(target), `: ${bits.toFixed(2)} bits; most likely:`);
  entry.append(summary, list);
  return entry;
}
passage.addEventListener("pointerover", (event) => show(spans.indexOf(event.target)));
passage.addEventListener("click", (event) => show(spans.indexOf(event.target)));
passage.addEventListener("focus", () => { if (at < 0) show(0); });
passage.addEventListener("keydown", (event) => {
  const right = getComputedStyle(passage).direction === "rtl" ? -1 : 1;
  const step = { ArrowRight: right, ArrowLeft: -right, ArrowDown: 10, ArrowUp: -10 }[event.key];
  if (!step) return;
  show(Math.max(0, Math.min(spans.length - 1, at + step)));
  spans[at].scrollIntoView({ block: "nearest" });
  event.preventDefault();
});
