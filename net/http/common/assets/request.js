// One request across nodes: a timeline with a row per node, the sources of its prompt, and the reasons for its placement.

import { element, ms, request, table } from "./dom.js";

const MIN_WIDTH = 560, LEFT = 130, ROW = 26, TOP = 22;
const PREFIXES = { local: "its own arena", arena: "another node's arena", pool: "the pool" };
const KINDS = { place: "placement", queue: "queue", move: "KV moves", compute: "prefill computes", decode: "decode" };

export async function showRequest(into, id) {
  const answer = await request(`/live/requests/${encodeURIComponent(id)}`);
  if (!answer.ok) {
    into.replaceChildren(element("p", { class: "bad" }, (await answer.json()).error.message));
    return;
  }
  const told = await answer.json();
  into.replaceChildren(element("div", { class: "card" },
    element("h3", { tabindex: "-1" }, `Request ${told.request_id}`), facts(told.summary), timeline(told, Math.max(MIN_WIDTH, into.clientWidth - 32)), placement(told.summary.placement)));
  into.querySelector("h3").focus({ preventScroll: true });
  into.scrollIntoView({ block: "nearest" });
}

function facts(summary) {
  const names = { placement_ms: "placed in", queue_ms: "queued", prefix_fetch_ms: "prefix fetched in", prefill_ms: "prefill", other_prompts_ms: "of it for other prompts", transfer_ms: "KV moved in", transfer_exposed_ms: "not hidden", ttft_ms: "TTFT", decode_ms: "decode", move_pauses_ms: "paused by moves", e2e_ms: "in all" };
  const times = Object.entries(names).filter(([field]) => summary[field]) // stages that did not happen took no time
    .map(([field, name]) => element("span", {}, `${name} ${ms(summary[field])}`));
  const tokens = `${summary.prompt_tokens} prompt tokens, ${summary.cached_tokens} of them found, ${summary.output_tokens} output tokens`;
  return element("div", { class: "legend" }, element("span", {}, tokens), times);
}

/** Bars {row, kind, begin, end, text}, in seconds on the acceptor's clock as far as offsets are known. */
export function bars(told) {
  const offset = (node) => told.clocks[node]?.offset_s ?? 0;
  const events = told.events.map((event) => ({ ...event, t: event.t - offset(event.node) }));
  const first = (name, node) => events.find((event) => event.event === name && (!node || event.node === node))?.t;
  const { acceptor, prefill, decode } = { acceptor: events[0]?.node, ...told.summary.nodes };
  const found = [];
  const bar = (row, kind, begin, end, text) => { if (begin !== undefined && end !== undefined && end >= begin) found.push({ row, kind, begin, end, text }); };
  bar(acceptor, "place", first("accepted"), first("placed"), "placement");
  bar(prefill, "queue", first("waiting", prefill), first("running", prefill), "queue");
  for (const event of events) {
    const kind = { prefix_fetched: "move", kv_moved: "move", computed: "compute" }[event.event];
    if (!kind) continue;
    const spans = event.detail.intervals ?? (event.detail.seconds ? [[event.detail.seconds, 0]] : []);
    const row = event.event === "computed" && event.node === decode && decode !== prefill ? null : event.node;
    for (const [begin, end] of spans) if (row) bar(row, kind, event.t - begin, event.t - end, event.event.replace("_", " "));
  }
  bar(decode, "decode", first("first_token"), first("answered") ?? first("aborted"), "decode");
  return found;
}

function timeline(told, width) {
  const all = bars(told);
  if (!all.length) return element("p", { class: "soft" }, "No times are known yet.");
  const rowOf = (bar) => `${bar.row}|${bar.kind === "move" ? "moves" : "works"}`;
  const rows = [...new Set(all.toSorted((a, b) => a.begin - b.begin).map(rowOf))];
  const begin = Math.min(...all.map((bar) => bar.begin)), end = Math.max(...all.map((bar) => bar.end), begin + 1e-6);
  const x = (t) => LEFT + (width - LEFT - 10) * (t - begin) / (end - begin);
  const height = TOP + ROW * rows.length + 6;
  const svg = element("svg", { class: "timeline", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `timeline of ${ms(1000 * (end - begin))}` });
  for (let i = 0; i <= 5; i += 1) {
    const t = begin + (end - begin) * i / 5;
    svg.append(element("line", { class: "axis", x1: x(t), x2: x(t), y1: TOP - 4, y2: height }), element("text", { class: "tick", x: x(t), y: 12, "text-anchor": i === 5 ? "end" : i ? "middle" : "start" }, ms(1000 * (t - begin))));
  }
  rows.forEach((row, i) => svg.append(element("text", { x: 0, y: TOP + ROW * i + 17 }, row.replace("|moves", ": KV").replace("|works", ""))));
  for (const bar of all) {
    const i = rows.indexOf(rowOf(bar));
    svg.append(element("rect", { class: `fill-${bar.kind}`, x: x(bar.begin), y: TOP + ROW * i + 4, width: Math.max(1, x(bar.end) - x(bar.begin)), height: ROW - 8, rx: 2 },
      element("title", {}, `${bar.text} ${ms(1000 * (bar.end - bar.begin))}`)));
  }
  const legend = Object.entries(KINDS).map(([kind, name]) => element("span", {}, element("i", { class: `fill-${kind}` }), name));
  const wide = element("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "timeline" }, svg);
  return element("div", {}, wide, element("div", { class: "legend" }, legend));
}

function placement(choice) {
  if (!choice?.considered?.length) return null;
  const cell = (value, name) => typeof value === "number" ? (name.endsWith("_s") ? ms(1000 * value) : String(Math.round(1000 * value) / 1000)) : value === undefined || value === null ? null : String(value);
  const chosen = (row) => row.node === choice[row.stage] ? "chosen" : row.skipped ? "skipped" : null;
  const decision = (row) => row.skipped ? element("span", { class: "why" }, row.skipped) : chosen(row) ? element("b", {}, "chosen") : "";
  const stages = [...new Set(choice.considered.map((row) => row.stage))];
  const candidates = (stage) => { // each stage has its own estimates
    const some = choice.considered.filter((row) => row.stage === stage);
    const estimates = [...new Set(some.flatMap((row) => Object.keys(row)))].filter((name) => !["stage", "node", "skipped"].includes(name) && some.some((row) => row[name]));
    const rows = some.map((row) => ({ attributes: { class: chosen(row) }, cells: [row.node, decision(row), ...estimates.map((name) => cell(row[name], name))] }));
    return table([`${stage} on`, "decision", ...estimates.map((name) => `#${name.replace(/_s$/, "").replaceAll("_", " ")}`)], rows);
  };
  return element("div", {}, element("h3", {}, `Placement: prefill on ${choice.prefill}, decode on ${choice.decode}, ${choice.prefix_tokens ? `${choice.prefix_tokens} tokens from ${PREFIXES[choice.prefix_source]}` : "no tokens found"}`),
    element("div", { class: "scroll candidates", tabindex: "0", role: "region", "aria-label": "candidates" }, stages.map(candidates)));
}
