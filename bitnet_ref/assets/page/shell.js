"use strict";
// What all views need: elements, requests with the key, the model, the tabs, the banner.

const VIEWS = ["chat", "completion", "engine"];
const KEY = "bitnet_ref key";
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
let view = "completion";
let model = null; // {id, loaded, max_model_len, chats}

// -- storage ----------------------------------------------------------------------------------------------------------

// Where the browser gives the page no storage: it forgets all when it is closed.
class Forgetful {
  getItem(key) {
    return this[key] ?? null;
  }
  setItem(key, value) {
    this[key] = value;
  }
  removeItem(key) {
    delete this[key];
  }
}

function storage(name) {
  try {
    return window[name];
  } catch {
    return new Forgetful();
  }
}

const tabStorage = storage("sessionStorage"), browserStorage = storage("localStorage");

// -- requests ---------------------------------------------------------------------------------------------------------

class ServerError extends Error {
  constructor(status, message, retryAfter = 0) {
    super(message);
    Object.assign(this, { status, retryAfter });
  }
}

// The response of the server. Without a valid key it asks for one and tries again. Raises ServerError.
async function ask(path, { body, signal } = {}) {
  for (;;) {
    const key = tabStorage.getItem(KEY);
    const headers = key ? { authorization: `Bearer ${key}` } : {};
    if (body) headers["content-type"] = "application/json";
    let response;
    try {
      response = await fetch(path, { method: body ? "POST" : "GET", headers, signal, body: body && JSON.stringify(body) });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      lookForServer();
      throw new ServerError(0, "The server does not answer.");
    }
    if (response.ok) return response;
    const facts = await response.json().catch(() => ({}));
    const message = facts.error?.message ?? `The server answered ${response.status}.`;
    if (response.status !== 401) throw new ServerError(response.status, message, Number(response.headers.get("retry-after")));
    if (key === tabStorage.getItem(KEY) && !(await askForKey(key))) throw new ServerError(401, "Without its key the server does nothing.");
  }
}

const getJson = async (path, options) => (await ask(path, options)).json();

// The events of a stream. Raises ServerError if it fails or ends early.
async function* readEvents(path, body, signal) {
  const reader = (await ask(path, { body, signal })).body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      part = { done: true };
    }
    if (part.done) {
      lookForServer();
      throw new ServerError(0, "The connection ended before the text did.");
    }
    const events = (rest + part.value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (event === "data: [DONE]") return;
      if (!event.startsWith("data: ")) continue;
      const facts = JSON.parse(event.slice(6));
      if (facts.error) throw new ServerError(500, facts.error.message);
      yield facts;
    }
  }
}

// What a person should read about an error, and do.
function explain(error) {
  const message = error.message.replace(/\.$/, "");
  if (error.status === 429) return `The server is full: ${message}. Try again in ${error.retryAfter || 1} s.`;
  if (error.status === 503) return `Not now: ${message}.`;
  if (error.status === 504) return `It took too long: ${message}.`;
  return error.message;
}

// -- the key ----------------------------------------------------------------------------------------------------------

let answer = null; // a promise, while the dialog is open

// Whether a key was given.
function askForKey(refused) {
  answer ??= new Promise((resolve) => {
    const dialog = $("key-dialog");
    $("key-problem").textContent = refused ? "The server does not accept this key." : "";
    $("key").value = "";
    dialog.showModal();
    const end = (given) => {
      answer = null;
      dialog.close();
      $("key-button").hidden = false;
      resolve(given);
    };
    $("key-form").onsubmit = (event) => {
      event.preventDefault();
      tabStorage.setItem(KEY, $("key").value.trim());
      end(true);
    };
    $("key-cancel").onclick = () => end(false);
    dialog.oncancel = (event) => {
      event.preventDefault();
      end(false);
    };
  });
  return answer;
}

$("key-button").onclick = async () => {
  if (await askForKey(null)) start();
};

// -- the server and its models ----------------------------------------------------------------------------------------

function say(text) {
  if ($("banner").textContent !== text) $("banner").textContent = text;
  $("banner").hidden = !text;
}

let looking = false;

// Wait until the server answers and has its models, and say so meanwhile.
async function lookForServer() {
  if (looking) return;
  looking = true;
  for (;;) {
    const status = await fetch("/health").then((response) => response.status, () => 0);
    if (status === 200) break;
    say(status === 503 ? "The server is loading its models." : "The server does not answer. Trying again.");
    await sleep(500);
  }
  looking = false;
  say("");
  start();
}

let isChosen = VIEWS.includes(location.hash.slice(1)); // the view, by the address; otherwise the first model decides

async function start() {
  try {
    const { data } = await getJson("/v1/models");
    const before = $("model").value;
    $("model").replaceChildren(...data.map(({ id }) => make("option", { value: id, textContent: id })));
    $("model").disabled = data.length < 2;
    if (data.some(({ id }) => id === before)) $("model").value = before;
    say("");
    await chooseModel();
  } catch (error) {
    say(explain(error));
  }
}

async function chooseModel() {
  const id = $("model").value;
  forgetEngine();
  const info = await getJson(`/props?model=${encodeURIComponent(id)}`).catch((error) => {
    if (error.status === 401) throw error;
    say(explain(error));
    return {};
  });
  if (id !== $("model").value) return; // another one was chosen meanwhile
  const defaults = info.default_generation_settings ?? { params: {} };
  model = { id, chats: Boolean(info.chat_template), context: defaults.n_ctx };
  $("chat-send").disabled = $("complete").disabled = false;
  showDefaults(defaults.params);
  $("thinking-row").hidden = !/enable_thinking|reasoning_effort/.test(info.chat_template);
  $("context").textContent = model.context ? `The model reads ${model.context.toLocaleString("en")} in all.` : "";
  $("chat-none-name").textContent = id;
  if (!isChosen) show(model.chats ? "chat" : "completion");
  isChosen = true;
  showChatState();
}

// The server's defaults for this model, as placeholders.
function showDefaults({ repeat_penalty, ...params }) {
  const given = { ...params, ...(repeat_penalty === undefined ? {} : { repetition_penalty: repeat_penalty }) };
  for (const [name, plain] of Object.entries(PLAIN)) $(name).placeholder = given[name] ?? plain;
}

$("model").onchange = () => chooseModel().catch((error) => say(explain(error)));

// -- tabs -------------------------------------------------------------------------------------------------------------

function show(name) {
  view = name;
  for (const each of VIEWS) {
    $(each).hidden = each !== name;
    $(`tab-${each}`).setAttribute("aria-selected", String(each === name));
    $(`tab-${each}`).tabIndex = each === name ? 0 : -1;
  }
  $("side").hidden = name === "engine";
  $("conversations").hidden = $("chat-settings").hidden = name !== "chat";
  $("max_tokens").placeholder = name === "chat" ? "512" : "64";
  document.querySelector("main").classList.toggle("with-settings", name !== "engine");
  if (location.hash !== `#${name}`) history.replaceState(null, "", `#${name}`);
}

for (const name of VIEWS) {
  $(`tab-${name}`).onclick = () => show(name);
  $(`tab-${name}`).onkeydown = ({ key }) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[key];
    if (!step) return;
    show(VIEWS[(VIEWS.indexOf(name) + step + VIEWS.length) % VIEWS.length]);
    $(`tab-${view}`).focus();
  };
}
addEventListener("hashchange", () => VIEWS.includes(location.hash.slice(1)) && show(location.hash.slice(1)));

// -- settings ---------------------------------------------------------------------------------------------------------

const SAMPLING = ["temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "max_tokens"];
const KEPT = [...SAMPLING, "tools", "schema", "thinking"];
const PLAIN = { temperature: 1, top_k: "0, all", top_p: 1, min_p: 0, repetition_penalty: 1 };

// The settings that are filled in; null, and the field shown, if one is wrong.
function readSettings(defaults) {
  if (!$("sampling").checkValidity()) {
    $("settings").open = true;
    $("sampling").reportValidity();
    return null;
  }
  const filled = SAMPLING.filter((name) => $(name).value !== "").map((name) => [name, Number($(name).value)]);
  return { ...defaults, ...Object.fromEntries(filled) };
}

// The tools and the schema that are filled in, as fields of a chat; null, and the field shown, if one is wrong.
function readChatSettings() {
  const fields = {};
  for (const [name, kind] of [["tools", "a list of tools"], ["schema", "an object"]]) {
    let value, problem = "";
    try {
      value = JSON.parse($(name).value || "null");
      if (value !== null && (typeof value !== "object" || Array.isArray(value) !== (name === "tools"))) problem = `Expected ${kind}.`;
    } catch (error) {
      problem = `Not JSON: ${error.message}`;
    }
    $(name).setCustomValidity(problem);
    if (value) fields[name] = value;
  }
  const { tools, schema } = fields, thinks = $("thinking").value;
  if (readSettings({}) === null) return null;
  return {
    ...(tools?.length ? { tools } : {}),
    ...(schema ? { response_format: { type: "json_schema", json_schema: { name: "answer", schema } } } : {}),
    ...(thinks && !$("thinking-row").hidden ? { enable_thinking: thinks === "on" } : {}),
  };
}

function keepSettings() {
  tabStorage.setItem("bitnet_ref settings", JSON.stringify(KEPT.map((name) => $(name).value)));
}

JSON.parse(tabStorage.getItem("bitnet_ref settings") ?? "[]").forEach((value, index) => ($(KEPT[index]).value = value));
$("sampling").oninput = ({ target }) => {
  target.setCustomValidity("");
  keepSettings();
};
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !$("key-dialog").open) document.querySelector(`#${view} .stop:not([hidden])`)?.click();
});
$("sampling").onreset = () => setTimeout(keepSettings);
$("sampling").onsubmit = (event) => event.preventDefault();

const wide = matchMedia("(min-width: 900px)");
wide.onchange = () => ($("settings").open = $("conversations").open = wide.matches);
wide.onchange();

addEventListener("DOMContentLoaded", () => {
  show(isChosen ? location.hash.slice(1) : "completion");
  lookForServer();
  watchEngine();
});
