// A chat with the served model: streams the answer, then shows its cost and a link to the request's timeline.

import { element, ms, request } from "./dom.js";

const MAX_TOKENS = 512;
const SAMPLING = { temperature: 0.2, top_p: 0.9 }; // at 0.7 the embedded model often answers in French nonsense
const at = (id) => document.getElementById(id);

/** show(request id): called by the link below an answer. */
export function startChat(show) {
  let history = [], running = null;
  const follow = (always) => { // scrolls with the growing text, unless the reader has scrolled back
    const box = at("messages");
    if (always || box.scrollHeight - box.scrollTop - box.clientHeight < 80) box.scrollTop = box.scrollHeight;
  };
  const say = (role, text) => {
    const said = element("div", { class: `message ${role}` }, element("span", {}, text));
    at("messages").append(said);
    follow(true);
    return said;
  };
  const busy = (on) => { at("stop").hidden = !on; at("chat").querySelector("[type=submit]").disabled = on; };

  async function ask(text) {
    history.push({ role: "user", content: text });
    say("user", text);
    const shown = say("assistant", "");
    running = new AbortController();
    busy(true);
    const begun = performance.now();
    try {
      const { id, usage, first } = await stream(history, running.signal, (piece) => { shown.firstChild.textContent += piece; follow(); });
      history.push({ role: "assistant", content: shown.firstChild.textContent });
      const facts = `${usage.prompt_tokens} prompt tokens (${usage.prompt_tokens_details.cached_tokens} found), ${usage.completion_tokens} output tokens, first after ${ms(first - begun)}, `;
      shown.append(element("span", { class: "soft" }, facts, element("button", { type: "button", onclick: () => show(id) }, "show the sources of its blocks")));
    } catch (error) {
      const stopped = error.name === "AbortError";
      if (stopped) history.push({ role: "assistant", content: shown.firstChild.textContent });
      else history.pop();
      shown.append(element("span", { class: stopped ? "soft" : "bad" }, stopped ? "stopped" : error.message));
    }
    running = null;
    busy(false);
    follow(true);
  }

  at("chat").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = at("prompt").value.trim();
    if (!text || running) return;
    at("prompt").value = "";
    ask(text);
  });
  at("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); at("chat").requestSubmit(); }
  });
  at("stop").addEventListener("click", () => running?.abort());
  at("clear").addEventListener("click", () => { running?.abort(); history = []; at("messages").replaceChildren(); at("prompt").focus(); });
}

async function stream(messages, signal, piece) {
  const body = { messages, max_tokens: MAX_TOKENS, ...SAMPLING, stream: true, stream_options: { include_usage: true } };
  const answer = await request("/v1/chat/completions", { method: "POST", signal, headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  const id = answer.headers.get("X-Request-Id");
  let usage = null, first = null, rest = "";
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") continue;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage ?? usage;
      first ??= performance.now();
      const text = chunk.choices[0]?.delta?.content;
      if (text) piece(text);
    }
  }
  if (!usage) throw new Error("the answer is incomplete: its node or the connection to it has ended");
  return { id, usage, first };
}
