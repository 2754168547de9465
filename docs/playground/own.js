// "Your own model": files go to the worker, which answers with what it read and wrote.

import { seedProblem, settings, shorten } from "./main.js";

let opened = null;

const say = (text, isProblem = false) => Object.assign($("own-facts"), { textContent: text, className: isProblem ? "facts problem" : "facts" });

function setBusy(isBusy) {
  $("own-files").disabled = $("own-write").disabled = isBusy;
  $("own-stop").hidden = !isBusy || opened === null;
  $("own-write").hidden = !$("own-stop").hidden;
}

function describe({ config, matrices, weights, grouped, note, hasTokenizer }) {
  const { kind, layers, hidden, heads, vocabulary, context } = config;
  const exact = matrices ? ` ${count(weights, "weight")} in ${count(matrices, "ternary matrix").replace("matrixs", "matrices")}: each product by WebAssembly equals plain JavaScript’s.` : "";
  const floats = grouped ? ` ${grouped} matrices have a scale for each group; their inputs stay floats.` : "";
  const words = hasTokenizer ? "" : " It has no tokenizer that this page knows, so write token ids, as in 1 15 7.";
  const order = note && ` ${note}`;
  return `${kind}: ${layers} layers of ${hidden} numbers, ${heads} heads, ${vocabulary.toLocaleString("en")} tokens, texts of up to ${context}.${exact}${floats}${order}${words}`;
}

const answers = {
  step: (text) => say(text),
  opened(facts) {
    opened = facts;
    say(describe(facts));
    $("own-form").hidden = false;
    $("own-text").textContent = "";
    if (!facts.hasTokenizer) $("own-prompt").value = "1 15 7";
    setBusy(false);
  },
  token: ({ text }) => ($("own-text").textContent = shorten(text)),
  done({ given, ids, logits, msPerToken }) {
    globalThis.playground.own = { given, ids, logits }; // for the tests
    $("own-speed").textContent = `${count(ids.length, "new token")}, ${seconds(msPerToken / 1000)} each.`;
    setBusy(false);
  },
  problem(text) {
    say(text, true);
    setBusy(false);
  },
};

// It starts with the page, so that it needs no network later.
const worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
worker.onmessage = ({ data }) => Object.entries(data).forEach(([kind, value]) => answers[kind](value));
worker.onerror = (event) => answers.problem(`${event.message || "worker.js could not be loaded."} Reload the page to try again.`);

function ask(message) {
  setBusy(true);
  worker.postMessage(message);
}

function open(files) {
  if (!files.length || $("own-files").disabled) return;
  opened = null;
  $("own-form").hidden = true;
  $("own-speed").textContent = "";
  ask({ open: [...files] });
}

$("own-files").onchange = () => open($("own-files").files);
$("own-form").onsubmit = (event) => {
  event.preventDefault();
  if (!$("own-prompt").value.trim()) return say("The field is empty: write a beginning.", true);
  if (seedProblem()) return say(seedProblem(), true);
  $("own-text").textContent = $("own-speed").textContent = "";
  say(describe(opened));
  ask({ write: $("own-prompt").value, settings: settings() });
};
$("own-stop").onclick = () => worker.postMessage({ stop: true });

// Files can be dropped anywhere on the page; a text is for the field it is dropped on.
function onFiles(kind, act) {
  document.addEventListener(kind, (event) => {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();
    $("own-drop").classList.toggle("over", kind === "dragover");
    act?.(event.dataTransfer.files);
  });
}
onFiles("dragover");
onFiles("dragleave");
onFiles("drop", (files) => {
  $("own").scrollIntoView();
  open(files);
});
