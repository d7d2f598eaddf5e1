// Text of messages: as it is, the beginning of long ones, the rest on demand.
import { html, useState } from "./lib.js";
import { SafeText } from "./format.js";

export function LongText({ text, loadAll, className = "" }) {
  const [all, setAll] = useState(null);
  const [error, setError] = useState(null);
  if (text === null || text === undefined || text === "") return null;
  if (typeof text === "string" || all !== null) return html`<div class=${`text ${className}`} dir="auto"><${SafeText} text=${all ?? text} /></div>`;
  const show = () => loadAll().then(setAll, (fault) => setError(fault.message));
  return html`<div class=${`text ${className}`} dir="auto"><${SafeText} text=${text.start} /> …</div>
    <p class="more">${loadAll && html`<button class="link" onClick=${show}>show all ${text.chars.toLocaleString("en-US")} characters</button>`} ${error && html`<span class="bad">${error}</span>`}</p>`;
}

export function plainText(text) {
  return text === null || text === undefined ? "" : typeof text === "string" ? text : `${text.start} …`;
}
