"use strict";
// What chats and completions share, and completion with the probabilities of each token.

// Runs `work` with a signal that the stop button aborts; it shows that button meanwhile.
async function whileRunning(startButton, stopButton, work) {
  const control = new AbortController();
  const had = document.activeElement === startButton;
  startButton.hidden = true;
  stopButton.hidden = false;
  if (had) stopButton.focus();
  stopButton.onclick = () => control.abort();
  try {
    await work(control.signal);
  } catch (error) {
    if (error.name !== "AbortError") throw error;
  } finally {
    const focused = document.activeElement === stopButton;
    startButton.hidden = false;
    stopButton.hidden = true;
    if (focused) startButton.focus();
  }
}

// Counts a stream's tokens and says how fast they came.
class Pace {
  constructor() {
    Object.assign(this, { begin: performance.now(), first: null, tokens: 0, reason: "" });
  }
  add(facts) {
    this.first ??= performance.now();
    if (facts.usage) this.tokens = facts.usage.completion_tokens;
    this.reason = facts.choices[0]?.finish_reason ?? this.reason;
  }
  toString() {
    const words = { stop: "the text is complete", length: "max_tokens reached", content_filter: "filtered", tool_calls: "waits for the result" };
    const speed = this.tokens / ((performance.now() - this.begin) / 1000); // of the whole: pieces may arrive together
    const parts = this.tokens ? [count(this.tokens, "token")] : ["stopped"];
    if (this.tokens > 1) parts.push(`${speed.toFixed(speed < 10 ? 1 : 0)} tokens/s`);
    if (this.first) parts.push(`first after ${seconds((this.first - this.begin) / 1000)}`);
    if (this.reason) parts.push(words[this.reason] ?? this.reason);
    return parts.join(" · ");
  }
}

// -- completion -------------------------------------------------------------------------------------------------------

const SHOWN = 10; // of the likeliest tokens
let tokens = []; // {text, offset, logprob, top: {text: ln p}, element}; offset: characters of the result before it
let result = { head: "", text: "" }; // the prompt, if it is not part of the result, and the result
let chosen = null;
let completing = false;

function addToken(text, offset, logprob, top) {
  const p = logprob == null ? null : Math.exp(logprob);
  const level = p == null || p >= 0.5 ? 0 : p >= 0.1 ? 1 : p >= 0.01 ? 2 : 3;
  const token = { text, offset, logprob, top };
  token.element = make("span", { className: `token p${level}`, role: "button", tabIndex: tokens.length ? -1 : 0, textContent: text.startsWith("bytes:") ? "\ufffd" : text });
  token.element.setAttribute("aria-pressed", "false");
  token.element.setAttribute("aria-label", `${visible(text)}, ${p == null ? "given" : percent(p)}`);
  tokens.push(token);
  $("tokens").append(token.element);
}

async function complete(prompt) {
  const settings = readSettings({ max_tokens: Math.min(64, model?.context ?? 64) });
  if (!settings || completing || !model) return;
  completing = true;
  tokens = [];
  choose(null);
  const echo = $("echo").checked;
  const given = make("span", { className: "given", textContent: echo ? "" : prompt });
  $("tokens").replaceChildren(given);
  $("result").hidden = false;
  $("tokens").classList.add("busy");
  $("complete-facts").className = "facts";
  $("complete-facts").textContent = "";
  const pace = new Pace();
  const options = { stream: true, stream_options: { include_usage: true }, logprobs: SHOWN, echo };
  result = { head: echo ? "" : prompt, text: "" };
  try {
    await whileRunning($("complete"), $("complete-stop"), async (signal) => {
      for await (const event of readEvents("/v1/completions", { model: model.id, prompt, ...options, ...settings }, signal)) {
        pace.add(event);
        result.text += event.choices[0]?.text ?? "";
        const part = event.choices[0]?.logprobs;
        part?.tokens.forEach((token, index) =>
          addToken(token, part.text_offset[index], part.token_logprobs[index], part.top_logprobs[index]),
        );
      }
    });
    $("complete-facts").textContent = String(pace);
  } catch (error) {
    $("complete-facts").className = "problem";
    $("complete-facts").textContent = explain(error);
  }
  $("token-legend").hidden = tokens.length === 0;
  $("tokens").classList.remove("busy");
  completing = false;
}

// Show what else a token might have been.
function choose(token) {
  chosen?.element.setAttribute("aria-pressed", "false");
  chosen = token;
  $("bars").hidden = !token;
  if (!token) return;
  token.element.setAttribute("aria-pressed", "true");
  for (const each of tokens) each.element.tabIndex = each === token ? 0 : -1;
  const title = make("code", { textContent: visible(token.text) });
  if (!token.top) {
    $("bars-title").replaceChildren(title, " is the first token: nothing predicted it.");
    $("bars-list").replaceChildren();
    return;
  }
  const entries = Object.entries(token.top).sort(([, a], [, b]) => b - a);
  if (!Object.hasOwn(token.top, token.text)) entries.push([token.text, token.logprob]);
  const place = entries.findIndex(([text]) => text === token.text);
  const rank = place < SHOWN ? (place === 0 ? "the likeliest" : `number ${place + 1}`) : `not among the first ${SHOWN}`;
  $("bars-title").replaceChildren(title, ` had ${percent(Math.exp(token.logprob))}: ${rank}.`);
  const largest = Math.exp(entries[0][1]);
  const rest = Math.max(0, 1 - entries.reduce((sum, [, logprob]) => sum + Math.exp(logprob), 0));
  const rows = entries.map(([text, logprob]) => bar(text, Math.exp(logprob), largest, text === token.text, token));
  if (rest > 0.0005) rows.push(bar(null, rest, Math.max(largest, rest), false, token));
  $("bars-list").replaceChildren(...rows);
}

function bar(text, p, largest, isChosen, token) {
  const canGo = text !== null && !isChosen && !text.startsWith("bytes:");
  return choiceRow(text === null ? "the rest" : visible(text), p, largest, isChosen, canGo && (() => {
    const prompt = result.head + Array.from(result.text).slice(0, token.offset).join("") + text;
    $("prompt").value = prompt;
    complete(prompt);
    $("result").scrollIntoView({ block: "nearest" });
  }));
}

$("tokens").onclick = ({ target }) => {
  choose(tokens.find((token) => token.element === target) ?? chosen);
  $("bars").scrollIntoView({ block: "nearest" });
};
$("tokens").onkeydown = (event) => {
  const place = tokens.findIndex((token) => token.element === event.target);
  const next = { ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: tokens.length - 1 }[event.key];
  if (place < 0) return;
  if (event.key === "Enter" || event.key === " ") choose(tokens[place]);
  else if (event.key === "Escape") choose(null);
  else if (tokens[next]) {
    tokens[next].element.focus();
    if (chosen) choose(tokens[next]);
  } else if (next === undefined) return;
  event.preventDefault();
};
$("complete-form").onsubmit = (event) => {
  event.preventDefault();
  complete($("prompt").value);
};
$("prompt").onkeydown = (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("complete-form").requestSubmit();
};
