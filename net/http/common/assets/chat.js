// A chat with the served model: streams the answer, then shows its cost and a link to the request's timeline.

import { element, ms, request } from "./dom.js";
import { markdown } from "./markdown.js";
import { keepSettings, onMarkdown, settings, showsMarkdown } from "./settings.js";

const KEPT = "mooncake-chat"; // in the session storage: a reload keeps the chat, a new tab begins without it
const at = (id) => document.getElementById(id);

/** show(request id): called by the link below an answer. */
export function startChat(show) {
  let turns = JSON.parse(sessionStorage.getItem(KEPT) ?? "[]"); // {role, content, id, facts}
  let running = null;
  const follow = (always) => { // scrolls with the growing text, unless the reader has scrolled back
    const box = at("messages");
    if (always || box.scrollHeight - box.scrollTop - box.clientHeight < 80) box.scrollTop = box.scrollHeight;
  };
  const say = (turn) => {
    const said = element("div", { class: `message ${turn.role}` }, element("div", { class: "text" }));
    write(said, turn);
    if (turn.facts) said.append(facts(turn));
    at("messages").append(said);
    follow(true);
    return said;
  };
  const facts = ({ id, facts }) => element("span", { class: "soft" }, facts, id ? element("button", { type: "button", onclick: () => show(id) }, "show the sources of its blocks") : null);
  const busy = (on) => { at("stop").hidden = !on; at("chat").querySelector("[type=submit]").disabled = on; };
  const keep = () => sessionStorage.setItem(KEPT, JSON.stringify(turns));

  async function ask(text, { body, system }) {
    const mine = turns; // "New chat" begins another list
    mine.push({ role: "user", content: text });
    say(mine.at(-1));
    const answer = { role: "assistant", content: "" };
    const shown = say(answer);
    running = new AbortController();
    busy(true);
    const begun = performance.now();
    let drawing = 0;
    const piece = (more) => {
      answer.content += more;
      drawing ||= requestAnimationFrame(() => { drawing = 0; write(shown, answer); follow(); });
    };
    const messages = [...(system ? [{ role: "system", content: system }] : []), ...mine.map(({ role, content }) => ({ role, content }))];
    try {
      const { id, usage, first } = await stream({ ...body, messages }, running.signal, piece);
      answer.id = id;
      answer.facts = `${usage.prompt_tokens} prompt tokens (${usage.prompt_tokens_details.cached_tokens} found), ${usage.completion_tokens} output tokens, first after ${ms(first - begun)}, `;
      mine.push(answer);
      shown.append(facts(answer));
    } catch (error) {
      const stopped = error.name === "AbortError";
      if (stopped) mine.push({ ...answer, facts: "stopped" });
      else mine.pop();
      shown.append(element("span", { class: stopped ? "soft" : "bad" }, stopped ? "stopped" : error.message));
    }
    cancelAnimationFrame(drawing);
    write(shown, answer);
    running = null;
    busy(false);
    keep();
    follow(true);
  }

  at("chat").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = at("prompt").value.trim();
    const chosen = text && !running ? settings() : null;
    if (!chosen) return;
    at("prompt").value = "";
    ask(text, chosen);
  });
  at("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); at("chat").requestSubmit(); }
  });
  at("stop").addEventListener("click", () => running?.abort());
  at("clear").addEventListener("click", () => { running?.abort(); turns = []; keep(); at("messages").replaceChildren(); at("prompt").focus(); });
  onMarkdown(() => { if (!running) { at("messages").replaceChildren(); turns.forEach(say); } });
  keepSettings();
  turns.forEach(say);
}

/** The text of a message: an answer as Markdown, if the reader wants that, and what the reader wrote as it is. */
function write(said, { role, content }) {
  const formatted = role === "assistant" && showsMarkdown();
  said.firstChild.className = formatted ? "text formatted" : "text";
  said.firstChild.replaceChildren(...(formatted ? markdown(content) : [content]));
}

async function stream(asked, signal, piece) {
  const body = { ...asked, stream: true, stream_options: { include_usage: true } };
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
