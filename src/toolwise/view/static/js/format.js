// Numbers and text as the pages show them.
import { html } from "./lib.js";

export function formatNumber(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value), sign = value < 0 ? "−" : "";
  if (size >= 1000 || Number.isInteger(value)) return sign + size.toLocaleString("en-US", { maximumFractionDigits: 0 });
  return sign + (size !== 0 && size < 10 ** -digits ? size.toExponential(1) : size.toFixed(digits));
}

export function formatSigned(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  return `${value > 0 ? "+" : ""}${formatNumber(value, digits)}`;
}

export function formatMetric(name, value) {
  if (value === null || value === undefined) return "–";
  if (name === "correct") return `${(100 * value).toFixed(1)} %`;
  return name === "tokens" ? value.toFixed(0) : formatNumber(value);
}

// "step-000012" as a person says it.
export function stepName(file) {
  const match = /^(step|eval)-0*(\d+)$/.exec(file ?? "");
  return match ? `${match[1] === "eval" ? "validation at " : ""}step ${match[2]}` : visibleText(file);
}

// A choice of [value, label] pairs.
export function Choice({ label, value, options, onChange, name }) {
  const select = html`<select aria-label=${name ?? label} onChange=${(event) => onChange(event.target.value)}>${options.map(([own, text]) => html`<option key=${own} value=${own} selected=${String(own) === String(value ?? "")}>${text}</option>`)}</select>`;
  return label ? html`<label>${label} ${select}</label>` : select;
}

export function markOf(correct) {
  return correct === true ? html`<span class="mark good" title="correct">✓</span>` : correct === false ? html`<span class="mark bad" title="not correct">✗</span>` : null;
}

// Characters that cannot be seen or that change the order of others are shown by their code.
const HIDDEN = /([\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff0-\ufffb]|[\u{e0000}-\u{e0fff}]|[\ud800-\udfff])/u;
const HIDDEN_ALL = new RegExp(HIDDEN.source, "gu");

function codePointName(character) {
  return `U+${character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
}

// The same as plain text, for options, titles and attributes.
export function visibleText(text) {
  return text === null || text === undefined ? "" : String(text).replaceAll(HIDDEN_ALL, codePointName);
}

export function SafeText({ text }) {
  if (!HIDDEN.test(text)) return text;
  const pieces = [];
  let end = 0;
  for (const match of text.matchAll(HIDDEN_ALL)) {
    if (match.index > end) pieces.push(text.slice(end, match.index));
    pieces.push(html`<span class="code-point" title="a character that is not shown">${codePointName(match[0])}</span>`);
    end = match.index + match[0].length;
  }
  pieces.push(text.slice(end));
  return pieces;
}
