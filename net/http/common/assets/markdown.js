// Markdown as elements. Text becomes text nodes and never HTML; a link shows its address.

import { element } from "./dom.js";

const FENCE = /^\s*(```|~~~)/, HEADING = /^(#{1,6})\s+(.*)/, RULE = /^\s*([-*_])(\s*\1){2,}\s*$/, QUOTE = /^\s*>\s?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)/, DIVIDER = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const INLINE = /`([^`]+)`|\*\*(?=\S)([^]+?\S?)\*\*|\*(?=[^\s*])([^*]+?)\*|(?<![\w_])_(?=[^\s_])([^_]+?)_(?![\w_])|~~([^~]+)~~|\[([^\]]+)\]\(([^()\s]+)\)|(\n)/g;
const MAX_DEPTH = 6; // of quotes and lists in each other

/** The elements of a text. */
export function markdown(text, depth = 0) {
  return blocks(text.split("\n"), depth);
}

function blocks(lines, depth) {
  const made = [];
  let i = 0;
  const take = (is) => { // the following lines as long as `is` holds
    const begin = i;
    while (i < lines.length && is(lines[i])) i += 1;
    return lines.slice(begin, i);
  };
  while (i < lines.length) {
    const line = lines[i], heading = HEADING.exec(line), fence = FENCE.exec(line);
    if (!line.trim()) i += 1;
    else if (fence) {
      i += 1;
      const code = take((next) => !next.trim().startsWith(fence[1]));
      i += 1; // the end of the fence, or of the text while it is written
      made.push(element("pre", { tabindex: "0" }, element("code", {}, code.join("\n"))));
    } else if (heading) {
      made.push(element(`h${Math.min(6, heading[1].length + 3)}`, {}, inline(heading[2])));
      i += 1;
    } else if (RULE.test(line)) {
      made.push(element("hr"));
      i += 1;
    } else if (QUOTE.test(line) && depth < MAX_DEPTH) {
      made.push(element("blockquote", {}, blocks(take((next) => QUOTE.test(next)).map((next) => next.replace(QUOTE, "")), depth + 1)));
    } else if (ITEM.test(line) && depth < MAX_DEPTH) {
      made.push(list(take((next) => next.trim() && (ITEM.test(next) || /^\s/.test(next))), depth));
    } else if (line.includes("|") && DIVIDER.test(lines[i + 1] ?? "")) {
      const [head, , ...body] = take((next) => next.includes("|"));
      made.push(tableOf(head, body));
    } else {
      const begin = i;
      i += 1;
      while (i < lines.length && lines[i].trim() && !(FENCE.test(lines[i]) || HEADING.test(lines[i]) || QUOTE.test(lines[i]) || ITEM.test(lines[i]))) i += 1;
      made.push(element("p", {}, inline(lines.slice(begin, i).join("\n"))));
    }
  }
  return made;
}

/** Lines that are deeper than the first item belong to the item above them. */
function list(lines, depth) {
  const [, indent, sign] = ITEM.exec(lines[0]);
  const items = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= indent.length + 1) items.push([item[3]]);
    else items.at(-1).push(line.replace(/^\s{1,4}/, ""));
  }
  const number = parseInt(sign, 10);
  return element(Number.isNaN(number) ? "ul" : "ol", { start: number > 1 ? number : null }, items.map((item) => {
    const [first, ...rest] = item;
    return element("li", {}, inline(first), rest.length ? blocks(rest, depth + 1) : []);
  }));
}

function tableOf(head, body) {
  const cells = (row) => row.trim().replace(/^\||\|$/g, "").split("|").map((cell) => inline(cell.trim()));
  const names = cells(head).map((cell) => element("th", { scope: "col" }, cell));
  const rows = body.map((row) => element("tr", {}, cells(row).map((cell) => element("td", {}, cell))));
  return element("div", { class: "wide", tabindex: "0" }, element("table", {}, element("thead", {}, element("tr", {}, names)), element("tbody", {}, rows)));
}

function inline(text) {
  const made = [];
  let last = 0;
  for (const match of text.matchAll(INLINE)) {
    const [whole, code, strong, star, under, gone, name, address, line] = match;
    if (match.index > last) made.push(text.slice(last, match.index));
    last = match.index + whole.length;
    if (code !== undefined) made.push(element("code", {}, code));
    else if (strong !== undefined) made.push(element("strong", {}, inline(strong)));
    else if (star ?? under) made.push(element("em", {}, inline(star ?? under)));
    else if (gone !== undefined) made.push(element("del", {}, inline(gone)));
    else if (line !== undefined) made.push(element("br"));
    else made.push(...link(name, address, whole));
  }
  if (last < text.length) made.push(text.slice(last));
  return made;
}

/** Only addresses of the web: a click must not run anything. */
function link(name, address, whole) {
  const known = URL.canParse(address) && ["http:", "https:"].includes(new URL(address).protocol);
  return known ? [`${name} (`, element("a", { href: address, target: "_blank", rel: "noopener noreferrer" }, address), ")"] : [whole];
}
