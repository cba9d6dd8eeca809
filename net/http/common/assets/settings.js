// The settings of the chat: sampling, the system message, Markdown. The browser keeps them.

const KEY = "mooncake-chat-settings";
const form = document.getElementById("sampling");
const fields = () => [...form.elements].filter((field) => field.name);

/** Fills the form with what this browser kept, and keeps every valid change. */
export function keepSettings() {
  const kept = JSON.parse(localStorage.getItem(KEY) ?? "{}");
  for (const field of fields()) {
    if (!(field.name in kept)) continue;
    if (field.type === "checkbox") field.checked = kept[field.name];
    else field.value = kept[field.name];
  }
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("change", () => {
    const values = fields().map((field) => [field.name, field.type === "checkbox" ? field.checked : field.value]);
    if (form.checkValidity()) localStorage.setItem(KEY, JSON.stringify(Object.fromEntries(values)));
  });
}

/** {fields of the request's body, system, markdown}; null if a field is wrong: the form then says which one. */
export function settings() {
  if (!form.checkValidity()) {
    document.getElementById("settings").open = true;
    form.reportValidity();
    return null;
  }
  const { temperature, top_p, max_tokens, seed, system } = form.elements;
  const body = { temperature: temperature.valueAsNumber, top_p: top_p.valueAsNumber, max_tokens: max_tokens.valueAsNumber };
  if (seed.value) body.seed = seed.valueAsNumber;
  return { body, system: system.value.trim() };
}

export const showsMarkdown = () => form.elements.markdown.checked;

export const onMarkdown = (listener) => form.elements.markdown.addEventListener("change", listener);
