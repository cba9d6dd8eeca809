// The current state of the cluster: asks GET /live once per second while the page is visible.

import { startChat } from "./chat.js";
import { drawCluster } from "./cluster.js";
import { bytes, element, ms, percent, request, table } from "./dom.js";
import { startHistory } from "./history.js";
import { showRequest } from "./request.js";

const PERIOD_MS = 1000;
const SOURCES = { hbm: "arena of the prefill node", arena: "arena of another node", dram: "DRAM of the pool", ssd: "SSD of the pool", computed: "computed" };
const at = (id) => document.getElementById(id);

async function poll() {
  if (!document.hidden) {
    try {
      const answer = await request("/live");
      if (!answer.ok) throw new Error((await answer.json()).error.message);
      show(await answer.json());
    } catch (error) {
      summarize(`no figures from this node: ${error.message}`, "bad");
    }
  }
  setTimeout(poll, PERIOD_MS);
}

/** Changes the text only if it differs, because screen readers read every change aloud. */
function summarize(text, className = "") {
  const summary = at("summary");
  if (summary.textContent !== text) summary.textContent = text;
  summary.className = className;
}

function show(live) {
  const speaking = live.nodes.filter((node) => !node.error);
  const sum = (value) => speaking.reduce((total, node) => total + (value(node) ?? 0), 0);
  const count = (number, name) => `${number} ${name}${number === 1 ? "" : "s"}`;
  summarize(`${count(live.nodes.length, "node")}, ${count(sum((n) => n.load?.running), "request")} running, ` +
    `${sum((n) => n.load?.waiting)} waiting; seen from ${live.node_id}`);
  const requests = speaking.flatMap((node) => node.recent.requests.map((row) => ({ ...row, acceptor: node.node_id })));
  requests.sort((a, b) => b.ended - a.ended);
  figures(requests, speaking);
  drawCluster(at("cluster"), live);
  at("nodes").replaceChildren(...live.nodes.map(card));
  tenants(speaking);
  rails(speaking);
  if (!at("requests").contains(document.activeElement) || document.activeElement === at("requests")) list(requests);
}

function figures(requests, nodes) {
  const tile = (name, value, count, title) => element("div", { class: "tile", title }, name, element("b", {}, value), element("span", { class: "soft" }, `of ${count} request${count === 1 ? "" : "s"}`));
  const measures = [["TTFT", "ttft_ms", "time to first token"], ["TBT", "tpot_ms", "mean time between tokens"]];
  const tiles = measures.flatMap(([name, field, meaning]) => {
    const values = requests.map((row) => row[field]).filter((value) => value !== null).sort((a, b) => a - b);
    const rank = (share) => values.length ? values[Math.min(values.length - 1, Math.floor(values.length * share / 100))] : null;
    return [50, 90, 99].map((share) => tile(`${name} p${share}`, ms(rank(share)), values.length, `${meaning}: ${share} % of the last requests took no longer`));
  });
  at("figures").replaceChildren(...tiles);
  const tokens = Object.keys(SOURCES).map((source) => [source, nodes.reduce((sum, n) => sum + n.recent.tokens_from[source], 0)]);
  at("sources").replaceChildren(sourcesBar(tokens));
  at("errors").textContent = estimateErrors(nodes);
}

/** The errors of the estimates of the last minutes, over all nodes. */
function estimateErrors(nodes) {
  const of = (name) => nodes.map((node) => node.recent.estimates?.[name]).filter((one) => one?.requests);
  const mean = (all, value, weight) => all.reduce((sum, one) => sum + one[value] * one[weight], 0) / all.reduce((sum, one) => sum + one[weight], 0);
  const names = { ttft_s: "time to first token", wait_s: "queue", prefill_s: "prefill", step_s: "time between tokens" };
  const parts = Object.entries(names).filter(([name]) => of(name).length).map(([name, text]) => {
    const shares = of(name).filter((one) => one.shares);
    return `${text} ${ms(1000 * mean(of(name), "error_s", "requests"))}${shares.length ? ` (${Math.round(100 * mean(shares, "mape", "shares"))} %)` : ""}`;
  });
  return parts.length ? `Mean error of the estimates in the last 5 minutes: ${parts.join(", ")}` : "";
}

/** The sources of the prompts' KV: a bar and its legend. */
export function sourcesBar(tokens) {
  const all = tokens.reduce((sum, [, count]) => sum + count, 0);
  if (!all) return element("p", { class: "soft" }, "No request has ended yet.");
  const parts = tokens.map(([source, count]) => element("i", { class: source, "width%": 100 * count / all }));
  const legend = tokens.map(([source, count]) => element("span", {}, element("i", { class: source }), `${SOURCES[source]} ${percent(count, all)} (${count} tokens)`));
  return element("div", {}, element("div", { class: "row" }, "Sources of their prompts' KV"), element("div", { class: "bar" }, parts), element("div", { class: "legend" }, legend));
}

const pair = (name, value) => element("div", { class: "row" }, element("span", {}, name), element("span", { class: "soft" }, value));

function card(node) {
  const fine = node.status === "alive" && !node.error;
  const title = element("h3", {}, element("span", { class: fine ? "dot" : "dot bad" }), node.node_id, node.roles.map((role) => element("span", { class: "role" }, role)));
  const lines = [pair(node.status, node.http)];
  if (node.error) lines.push(element("div", { class: "bad" }, node.error));
  if (node.loading) lines.push(element("div", { class: "soft" }, node.loading));
  if (node.load) lines.push(pair(`${node.load.running} running, ${node.load.waiting} waiting`, `${ms(1000 * node.load.work_s)} queued`));
  const fill = (name, used, whole, kind) => lines.push(
    pair(name, `${bytes(used)} of ${bytes(whole)}`),
    element("div", { class: "bar" }, element("i", { class: kind, "width%": whole ? 100 * used / whole : 0 })),
  );
  if (node.blocks) lines.push(...arena(node.blocks, node.block_bytes));
  for (const [tier, held] of Object.entries(node.tiers ?? {})) fill(tier.toUpperCase(), held.blocks * node.slot_bytes, held.capacity * node.slot_bytes, tier);
  return element("article", { class: "card" }, title, lines);
}

/** The blocks of a node's KV arena by state. */
function arena(blocks, size) {
  const states = [["held", "held by requests"], ["cached", "kept for later requests"], ["free", "free"]];
  const legend = states.map(([state, meaning]) => element("span", { title: meaning }, element("i", { class: state }), `${bytes(blocks[state] * size)} ${state}`));
  return [
    pair("KV arena", `${bytes((blocks.held + blocks.cached) * size)} of ${bytes(blocks.total * size)}`),
    element("div", { class: "bar" }, states.map(([state]) => element("i", { class: state, "width%": 100 * blocks[state] / blocks.total }))),
    element("div", { class: "legend small" }, legend),
  ];
}

/** The figures of --tenants, added up over the shares of all nodes. */
function tenants(nodes) {
  const found = new Map();
  for (const node of nodes) for (const [name, row] of Object.entries(node.tenants)) {
    const known = found.get(name) ?? { bytes: 0, quota: null, refused: 0 };
    found.set(name, { bytes: known.bytes + row.bytes, quota: row.quota === null ? known.quota : row.quota + known.quota, refused: known.refused + row.refused });
  }
  const rows = [...found].map(([name, row]) => [name, bytes(row.bytes), row.quota === null ? null : bytes(row.quota), row.quota === null ? null : percent(row.bytes, row.quota), row.refused]);
  at("tenants-section").hidden = !rows.length;
  at("tenants").replaceChildren(table(["tenant", "#used", "#quota", "#of the quota", "#blocks refused"], rows));
}

const WAYS = { shm: "shared memory (shm)", tcp: "TCP", rdma: "RDMA" };

function rails(nodes) {
  const rows = nodes.flatMap((node) => node.paths.map((path) => [
    node.node_id, path.peer, WAYS[path.transport] ?? path.transport, path.gb_per_s ? `${path.gb_per_s.toFixed(2)} GB/s` : null, bytes(path.bytes_read), bytes(path.bytes_written),
    ms(path.p50_ms), ms(path.p99_ms), path.retries, path.failures, element("span", { class: "why" }, path.why ?? "–"),
  ]));
  const columns = ["node", "with", "over", "#mean rate", "#read", "#written", "#half within", "#99 % within", "#sent again", "#failed", "why this way"];
  at("rails").replaceChildren(rows.length ? table(columns, rows) : element("p", { class: "soft card" }, "No node has opened a connection to another one yet."));
}

function list(requests) {
  const rows = requests.slice(0, 100).map((row) => [
    element("button", { type: "button", title: row.id, onclick: () => showRequest(at("request"), row.id) }, row.id.length > 14 ? `${row.id.slice(0, 12)}…` : row.id),
    row.acceptor, row.nodes.prefill, row.nodes.decode, row.class, row.prompt_tokens,
    percent(row.prompt_tokens - row.tokens_from.computed, row.prompt_tokens), row.output_tokens, ms(row.ttft_ms), ms(row.tpot_ms), row.reason,
  ]);
  const columns = ["request", "acceptor", "prefill", "decode", "class", "#prompt", "#found", "#output", "#TTFT", "#TBT", "end"];
  at("requests").replaceChildren(rows.length ? table(columns, rows) : element("p", { class: "soft card" }, "No request has ended yet; ask below."));
}

const THEME = "mooncake-theme";
if (localStorage.getItem(THEME)) document.documentElement.dataset.theme = localStorage.getItem(THEME);
at("theme").addEventListener("click", () => {
  const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  localStorage.setItem(THEME, document.documentElement.dataset.theme = dark ? "light" : "dark");
});
async function nameTheModel() {
  const answer = await request("/v1/models");
  if (!answer.ok) return;
  const [model] = (await answer.json()).data;
  at("chat-title").textContent = `Chat with ${model.id}`;
  document.querySelector(".talk").hidden = model.max_model_len === 0; // a store without a model
}

startChat((id, shown) => showRequest(shown ?? at("request"), id));
nameTheModel();
startHistory();
poll();
