// The gateway's page: a chat over its API, and what its fleet does now.
// What a model writes becomes text nodes and nothing else; the key is in sessionStorage and nowhere else.

const HISTORY = 60; // seconds, and points of a line
const NODE = 1000; // characters of a text node, which is shaped anew when it grows
const SVG = "http://www.w3.org/2000/svg";
const at = (id) => document.getElementById(id);

function made(tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.textContent = text;
  return element;
}

/** The data of server-sent events, out of pieces of text that end anywhere. */
export class EventReader {
  #rest = "";

  read(text) {
    const lines = (this.#rest + text).split("\n");
    this.#rest = lines.pop();
    return lines.filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim());
  }
}

/** Tool calls, out of their deltas. */
export class ToolCalls {
  calls = [];

  add(deltas) {
    for (const { index = 0, id, function: part = {} } of deltas) {
      const call = (this.calls[index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
      if (id) call.id = id;
      call.function.name += part.name ?? "";
      call.function.arguments += part.arguments ?? "";
    }
  }
}

/** A shell command that sends the same. The key is left to a variable: commands get pasted. */
export function curl(url, body, hasKey) {
  const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;
  const key = hasKey ? ` -H "Authorization: Bearer $PACELINE_TOKEN"` : "";
  return `curl -N ${quoted(url)} -H 'Content-Type: application/json'${key} -d ${quoted(JSON.stringify(body))}`;
}

/** A sentence for what went wrong. */
export async function sentence(response) {
  let said = `${response.status} ${response.statusText}`.trim();
  try {
    said = (await response.json()).error.message;
  } catch {} // it is no JSON: another server's, a proxy's
  const after = response.headers.get("retry-after");
  return after ? `${said} (try again in ${after} s)` : said;
}

/** Executors' sums as what the strip shows; `before` is an earlier answer, `seconds` the time since. */
export function figures(now, before, seconds) {
  const sum = (value) => now.executors.reduce((total, executor) => total + value(executor), 0);
  const known = new Map((before?.scheduler_id === now.scheduler_id ? before.executors : []).map((one) => [one.address, one]));
  const blocks = sum((one) => one.num_blocks);
  return {
    ready: sum((one) => one.state === "ready"),
    executors: now.executors.length,
    running: sum((one) => one.num_running_requests),
    waiting: now.num_waiting_requests,
    kv: blocks ? (100 * sum((one) => one.num_used_blocks)) / blocks : 0,
    tokens: sum((one) => Math.max(0, one.num_output_tokens - (known.get(one.address) ?? one).num_output_tokens)) / seconds,
  };
}

/** Where the newest is kept in sight, unless somebody has scrolled away from it. */
class Log {
  #follows = true;

  constructor(element) {
    this.element = element;
    element.addEventListener("scroll", () => {
      this.#follows = element.scrollHeight - element.scrollTop - element.clientHeight < 80;
    });
  }

  follow(always = false) {
    this.#follows ||= always;
    if (this.#follows) this.element.scrollTop = Number.MAX_SAFE_INTEGER;
  }
}

/** Text that grows: a block for each line, so that what is laid out again is the last line. One change for each frame. */
class Growing {
  #node = null;
  #pending = "";
  #frame = 0;

  constructor(parent, log) {
    this.parent = parent;
    this.log = log;
  }

  add(text) {
    this.#pending += text;
    this.#frame ||= requestAnimationFrame(() => this.flush());
  }

  flush() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    if (!this.#pending) return;
    const [first, ...lines] = this.#pending.split("\n");
    this.#pending = "";
    if (this.#node === null) lines.unshift(first);
    else if (this.#node.length < NODE) this.#node.appendData(first);
    else this.#node.after((this.#node = document.createTextNode(first)));
    for (const line of lines) {
      const block = document.createElement("div");
      block.append((this.#node = document.createTextNode(line)));
      this.parent.append(block);
    }
    this.log.follow();
  }
}

/** One answer on the page, as it comes. */
class Answer {
  content = "";
  tools = new ToolCalls();
  #started = performance.now();
  #first = 0;
  #last = 0;
  #chunks = 0;
  #usage = null;
  #finish = null;

  constructor(log, model, command) {
    this.log = log;
    this.article = made("article", "assistant");
    this.article.setAttribute("aria-busy", "true");
    this.article.append(made("h2", "", model || "Model"));
    this.text = made("div", "text");
    this.numbers = made("p", "figures", "waiting for the first token");
    this.article.append(this.text, this.numbers, this.#request(command));
    this.body = new Growing(this.text, log);
    log.element.append(this.article);
    log.follow(true);
  }

  #request(command) {
    const details = made("details");
    const copy = made("button", "", "Copy");
    const shown = made("pre", "", command);
    shown.tabIndex = 0;
    copy.type = "button";
    copy.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(command);
        copy.textContent = "Copied";
      } catch { // not served from localhost nor by HTTPS
        getSelection().selectAllChildren(shown);
        copy.textContent = "Selected: copy it";
      }
    });
    details.append(made("summary", "", "Request as curl"), copy, shown);
    return details;
  }

  take(chunk) {
    if (chunk.usage) this.#usage = chunk.usage;
    for (const { delta = {}, finish_reason: reason } of chunk.choices ?? []) {
      if (reason) this.#finish = reason;
      const thought = delta.reasoning_content ?? delta.reasoning ?? "";
      if (!delta.content && !thought && !delta.tool_calls) continue;
      this.#last = performance.now();
      this.#first ||= this.#last;
      this.#chunks += 1;
      if (thought) this.#think(thought);
      if (delta.content) {
        this.content += delta.content;
        this.body.add(delta.content);
      }
      if (delta.tool_calls) this.#call(delta.tool_calls);
    }
  }

  #think(text) {
    if (!this.thoughts) {
      const details = made("details", "reasoning");
      const inside = made("div", "text");
      details.append(made("summary", "", "Reasoning"), inside);
      this.article.insertBefore(details, this.text);
      this.thoughts = new Growing(inside, this.log);
    }
    this.thoughts.add(text);
  }

  #call(deltas) {
    this.tools.add(deltas);
    this.toolList ??= this.article.insertBefore(made("div", "tools"), this.numbers);
    this.tools.calls.forEach((call, index) => {
      while (this.toolList.children.length <= index) {
        const shown = this.toolList.appendChild(made("pre"));
        shown.tabIndex = 0;
      }
      this.toolList.children[index].textContent = `${call.function.name}(${call.function.arguments})`;
    });
  }

  count() {
    if (!this.#first) return;
    const tokens = this.#usage?.completion_tokens ?? this.#chunks;
    const seconds = (this.#last - this.#first) / 1000;
    const parts = [`first token ${Math.round(this.#first - this.#started)} ms`, `${tokens} tokens`];
    if (tokens > 1 && seconds > 0) parts.push(`${((tokens - 1) / seconds).toFixed(1)} tokens/s`);
    if (this.#finish && this.#finish !== "stop") parts.push(`ended by ${this.#finish}`);
    this.numbers.textContent = parts.join(" · ");
  }

  end(trouble) {
    this.body.flush();
    this.thoughts?.flush();
    this.count();
    if (!this.#first) this.numbers.textContent = "no answer";
    if (trouble) this.article.insertBefore(made("p", "trouble", trouble), this.numbers);
    this.article.setAttribute("aria-busy", "false");
    this.log.follow();
  }

  get hasBegun() {
    return this.#first > 0;
  }

  get message() {
    const calls = this.tools.calls;
    return { role: "assistant", content: this.content, ...(calls.length ? { tool_calls: calls } : {}) };
  }
}

/** Sends, shows and keeps the conversation. */
class Chat {
  #messages = [];
  #aborting = null;

  constructor() {
    this.log = new Log(at("log"));
    at("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    at("prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#send();
    });
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.stop());
    at("stop").addEventListener("click", () => this.stop());
    at("clear").addEventListener("click", () => this.#clear());
  }

  stop() {
    this.#aborting?.abort();
  }

  #clear() {
    this.stop();
    this.#messages = [];
    this.log.element.replaceChildren();
    at("status").textContent = "";
    at("prompt").focus();
  }

  #body() {
    const body = { model: at("model").value, messages: this.#messages, stream: true, stream_options: { include_usage: true } };
    if (at("max-tokens").value) body.max_tokens = Number(at("max-tokens").value);
    if (at("temperature").value) body.temperature = Number(at("temperature").value);
    return body;
  }

  async #send() {
    const text = at("prompt").value;
    if (!text.trim() || this.#aborting) return;
    const messages = this.#messages;
    at("prompt").value = "";
    at("empty")?.remove();
    messages.push({ role: "user", content: text });
    const asked = made("article", "user");
    asked.append(made("h2", "", "You"), made("div", "text"));
    asked.lastChild.append(made("div", "", text));
    this.log.element.append(asked);
    const body = this.#body();
    const url = new URL("v1/chat/completions", location.href);
    const answer = new Answer(this.log, body.model, curl(url.href, body, at("key").value !== ""));
    this.#running(new AbortController());
    const counting = setInterval(() => answer.count(), 250);
    const trouble = await this.#stream(url, JSON.stringify(body), answer);
    clearInterval(counting);
    answer.end(trouble);
    at("status").textContent = trouble ? "not answered whole" : "answered";
    this.#running(null);
    if (answer.hasBegun) messages.push(answer.message);
    else {
      messages.pop(); // and can be sent again
      at("prompt").value ||= text;
    }
  }

  #running(aborting) {
    this.#aborting = aborting;
    at("send").hidden = aborting !== null;
    at("stop").hidden = aborting === null;
    if (aborting) at("status").textContent = "answering";
    at("prompt").focus();
  }

  /** Null, or what went wrong. */
  async #stream(url, body, answer) {
    const signal = this.#aborting.signal;
    try {
      const response = await fetch(url, { method: "POST", headers: { "Content-Type": "application/json", ...bearer() }, body, signal });
      if (!response.ok) return await sentence(response);
      const reader = new EventReader();
      for await (const text of texts(response.body)) {
        for (const data of reader.read(text)) {
          if (data === "[DONE]") return null;
          const chunk = JSON.parse(data);
          if (chunk.error) return chunk.error.message;
          answer.take(chunk);
        }
      }
      return "The answer broke off.";
    } catch (error) {
      return signal.aborted ? "Stopped." : `The gateway cannot be reached, or went away: ${error.message}`;
    }
  }
}

async function* texts(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  for (let part = await reader.read(); !part.done; part = await reader.read()) yield part.value;
}

const bearer = () => (at("key").value ? { Authorization: `Bearer ${at("key").value}` } : {});

async function listModels() {
  const select = at("model");
  let said = "";
  try {
    const response = await fetch("v1/models", { headers: bearer() });
    if (response.ok) {
      const chosen = select.value;
      const names = (await response.json()).data.map((model) => model.id);
      select.replaceChildren(...names.map((name) => new Option(name, name, false, name === chosen)));
      if (!names.length) said = "No model is served yet.";
    } else said = await sentence(response);
  } catch {
    said = "The gateway cannot be reached.";
  }
  at("status").textContent = said;
  return said === "";
}

/** The strip: asks once a second, while somebody looks. */
class Fleet {
  #before = null;
  #beforeMs = 0;
  #cards = new Map();
  #timer = 0;

  constructor() {
    for (const name of ["Executors", "Running", "Waiting", "KV cache", "Tokens/s"]) this.#cards.set(name, this.#card(name));
    document.addEventListener("visibilitychange", () => document.hidden || this.ask());
  }

  #card(name) {
    const group = made("div");
    const term = made("dt", "", name);
    const shown = made("dd", "", "–");
    const value = shown.firstChild;
    const picture = document.createElementNS(SVG, "svg");
    const line = document.createElementNS(SVG, "polyline");
    picture.setAttribute("viewBox", `0 0 ${HISTORY - 1} 20`);
    picture.setAttribute("preserveAspectRatio", "none");
    picture.setAttribute("aria-hidden", "true");
    picture.append(line);
    shown.append(picture);
    group.append(term, shown);
    at("figures").append(group);
    return { value, line, values: [] };
  }

  #show(name, value, text, top) {
    const card = this.#cards.get(name);
    card.value.data = text;
    card.values = [...card.values, value].slice(-HISTORY);
    const highest = Math.max(top, ...card.values);
    const from = HISTORY - card.values.length;
    card.line.setAttribute("points", card.values.map((each, i) => `${from + i},${(19 - (18 * each) / highest).toFixed(1)}`).join(" "));
  }

  async ask() {
    clearTimeout(this.#timer);
    if (document.hidden) return;
    const beganMs = performance.now();
    let trouble = "";
    let pauseMs = 1000;
    try {
      const response = await fetch("fleet", { headers: bearer() });
      if (response.ok) this.#take(await response.json());
      else {
        trouble = await sentence(response);
        if (response.status === 401 || response.status === 403) {
          trouble = `No fleet without an operator's key: ${trouble}`;
          this.#before = null;
          pauseMs = 10_000;
        }
      }
    } catch {
      trouble = "The gateway cannot be reached.";
    }
    at("fleet-trouble").textContent = trouble;
    at("fleet-trouble").hidden = !trouble;
    at("figures").hidden = trouble !== "" && this.#before === null;
    clearTimeout(this.#timer); // of another call meanwhile
    this.#timer = setTimeout(() => this.ask(), Math.max(0, pauseMs - (performance.now() - beganMs)));
  }

  #take(now) {
    const nowMs = performance.now();
    const found = figures(now, this.#before, Math.max(0.001, (nowMs - this.#beforeMs) / 1000));
    this.#before = now;
    this.#beforeMs = nowMs;
    this.#show("Executors", found.ready, `${found.ready}/${found.executors}`, Math.max(1, found.executors));
    this.#show("Running", found.running, String(found.running), 1);
    this.#show("Waiting", found.waiting, String(found.waiting), 1);
    this.#show("KV cache", found.kv, `${found.kv.toFixed(0)} %`, 100);
    this.#show("Tokens/s", found.tokens, found.tokens.toFixed(0), 1);
    const troubled = now.executors.filter((one) => one.state !== "ready");
    at("executor-troubles").replaceChildren(...troubled.map((one) => made("li", "", `${one.address} ${one.state} ${one.last_error}`)));
    at("executor-troubles").hidden = !troubled.length;
  }
}

function start() {
  at("key").value = sessionStorage.getItem("bearer") ?? "";
  const fleet = new Fleet();
  at("key").addEventListener("change", () => {
    sessionStorage.setItem("bearer", at("key").value);
    listModels();
    fleet.ask();
  });
  new Chat();
  fleet.ask();
  const again = async () => (await listModels()) || setTimeout(again, 3000);
  again();
}

if (globalThis.document) start();
