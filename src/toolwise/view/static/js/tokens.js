// Tokens coloured by one of their numbers, and the numbers of the one that is looked at.
import { html, useRef } from "./lib.js";
import { colour } from "./charts.js";
import { formatNumber, formatSigned, SafeText } from "./format.js";

export const COLOURINGS = [["advantages", "advantage"], ["logprobs", "log-prob"], ["entropies", "entropy"], ["gaps", "log-prob gap"], ["clipped", "clipped or masked"], ["versions", "policy version"], ["none", "none"]];
export const PART_LABELS = { trajectory: "trajectory", step: "step, same state", thinking: "thinking", price: "price", kl: "KL", critic: "critic" };
export const FACTOR_LABELS = { group_scale: "1 / spread of the group", whitening: "whitening, 1 / spread of the batch", reweighting: "reweighting of the level" };

// The largest size of a column over all steps, to which colours are relative; null if it is not stored.
export function scaleOf(steps, column) {
  if (!steps.some((step) => step[column])) return null;
  let high = 0;
  for (const step of steps) for (const value of step[column] ?? []) if (typeof value === "number" && Math.abs(value) > high) high = Math.abs(value);
  return high;
}

export function versionsOf(steps) {
  return [...new Set(steps.flatMap((step) => step.versions ?? []))].sort((a, b) => a - b);
}

function shade(column, value, scale, versions) {
  if (value === null || value === undefined || column === "none") return "";
  if (column === "clipped") return value ? `${colour("bad")}66` : "";
  if (column === "versions") return `${colour(`run-${versions.indexOf(value) % 6}`)}44`;
  if (!scale) return "";
  const share = Math.min(1, Math.abs(value) / scale);
  if (share < 0.01) return "";
  const base = column === "advantages" || column === "gaps" ? colour(value > 0 ? "positive" : "negative") : colour(column === "entropies" ? "run-4" : "run-3");
  return base + Math.round(25 + Number(colour("shade")) * share).toString(16).padStart(2, "0");
}

export function TokenStrip({ step, column, scale, versions, selected, onSelect }) {
  const strip = useRef(null);
  const values = step[column];
  const pick = (event, pinned) => {
    const index = event.target.closest("[data-token]")?.dataset.token;
    if (index !== undefined) onSelect(step.step, Number(index), pinned);
  };
  return html`<div class="tokens" ref=${strip} onMouseOver=${(event) => pick(event, false)} onClick=${(event) => pick(event, true)} aria-label=${`${step.count} tokens`}>
    ${step.texts.map((text, index) => html`<${Token} key=${index} index=${index} text=${text} id=${step.ids[index]} background=${values ? shade(column, values[index], scale, versions) : ""} current=${selected?.step === step.step && selected.index === index} />`)}
    ${step.count > step.texts.length && html`<span class="muted"> … ${(step.count - step.texts.length).toLocaleString("en-US")} more tokens</span>`}</div>`;
}

function Token({ index, text, id, background, current }) {
  const shown = text === null ? `#${id}` : text === "" ? "▯" : text;
  const control = text === null || text === "";
  return html`<span data-token=${index} class=${`token ${control ? "faint" : ""} ${current ? "current" : ""}`} style=${{ background }}><${TokenText} text=${shown} /></span>${text?.includes("\n") ? html`<br />` : ""}`;
}

export function TokenText({ text }) {
  const visible = text.replaceAll("\n", "⏎").replaceAll("\t", "⇥");
  return html`<${SafeText} text=${visible} />`;
}

// Everything known about one token; the parts of its advantage as an equation that adds up.
export function TokenDetail({ step, index }) {
  if (!step || index === undefined || index >= step.texts.length) return html`<p class="muted">Point at a token, or move with ← and →.</p>`;
  const value = (name) => step[name]?.[index];
  const row = (label, shown, title) => shown !== undefined && shown !== null && html`<tr title=${title || ""}><td>${label}</td><td class="number">${shown}</td></tr>`;
  const logprob = value("logprobs"), gap = value("gaps");
  return html`<div class="token-detail" data-step=${step.step} data-index=${index}>
    <p class="token-name"><code><${TokenText} text=${step.texts[index] ?? `#${step.ids[index]}`} /></code> <span class="muted">id ${step.ids[index]}, step ${step.step}, token ${index}</span></p>
    <table class="figures"><tbody>
      ${row("probability", formatNumber(Math.exp(logprob), 4))}
      ${row("log-prob", html`<span data-value="logprob" title=${logprob}>${formatNumber(logprob, 4)}</span>`)}
      ${gap !== undefined && gap !== null && row("gap, learner − engine", html`<span title=${gap}>${formatSigned(gap, 5)}</span>`)}
      ${value("entropies") !== undefined && value("entropies") !== null && row("entropy", `${formatNumber(value("entropies"))} nats`)}
      ${step.clipped && row("clipped or masked", value("clipped") ? html`<b class="bad">yes</b>` : "no")}
      ${row("policy version", value("versions"))}
    </tbody></table>
    ${step.advantages ? html`<${PartsTable} step=${step} index=${index} />` : html`<p class="muted">Not trained on: no advantage.</p>`}</div>`;
}

export function partsOf(step, index) {
  const at = ([name, values]) => [name, values?.[index] ?? null];
  const parts = Object.entries(step.parts).map(at).filter(([, value]) => value !== null);
  const factors = Object.entries(step.factors).map(at).filter(([, value]) => value !== null);
  const sum = parts.reduce((total, [, value]) => total + value, 0);
  return { parts, factors, sum, product: factors.reduce((total, [, value]) => total * value, sum), used: step.advantages[index] };
}

function PartsTable({ step, index }) {
  const { parts, factors, sum, product, used } = partsOf(step, index);
  const exact = (value, digits = 6) => html`<span title=${value}>${formatSigned(value, digits)}</span>`;
  const size = Math.max(...parts.map(([, value]) => Math.abs(value)), 1e-12);
  if (!parts.length) return html`<h4>Advantage</h4><p class="total" data-advantage=${used}>${exact(used)}</p><p class="note">The estimator does not say what it consists of.</p>`;
  return html`<h4>Advantage</h4><table class="figures parts"><tbody>
    ${parts.map(([name, value]) => html`<tr data-part=${name} data-value=${value}><td>${PART_LABELS[name] ?? name}</td><td><span class="bar both"><i class=${value < 0 ? "negative" : "positive"} style=${{ width: `${50 * Math.abs(value) / size}%` }}></i></span></td><td class="number">${exact(value)}</td></tr>`)}
    ${parts.length > 1 && factors.length > 0 && html`<tr class="sum"><td>sum</td><td></td><td class="number">${exact(sum)}</td></tr>`}
    ${factors.map(([name, value]) => html`<tr data-factor=${name} data-value=${value}><td>${FACTOR_LABELS[name] ?? name}</td><td></td><td class="number">× <span title=${value}>${formatNumber(value, 6)}</span></td></tr>`)}
    <tr class="sum"><td>used in the update</td><td></td><td class="number"><b data-advantage=${used}>${exact(used)}</b></td></tr></tbody></table>
    ${Math.abs(product - used) > 1e-6 * Math.max(1, Math.abs(used)) && html`<p class="error">The parts give ${formatSigned(product, 6)}.</p>`}`;
}

export function Legend({ column, scale, versions }) {
  if (column === "none") return null;
  if (column === "versions") return html`<span class="legend">${versions.map((version) => html`<span><i style=${{ background: shade("versions", version, 1, versions) }}></i>${version < 0 ? "unknown" : version}</span>`)}</span>`;
  if (column === "clipped" && scale !== null) return html`<span class="legend"><span><i style=${{ background: shade(column, true) }}></i>clipped or masked</span></span>`;
  if (scale === null) return html`<span class="muted">${column === "advantages" ? "none: this rollout was not trained on" : "not stored for this rollout: an update measures it, and not every run keeps it"}</span>`;
  if (!scale) return html`<span class="muted">all 0</span>`;
  const both = column === "advantages" || column === "gaps";
  return html`<span class="legend">${both && html`<span><i style=${{ background: shade(column, -scale, scale) }}></i>−${formatNumber(scale)}</span>`}<span><i></i>0</span><span><i style=${{ background: shade(column, both ? scale : -scale, scale) }}></i>${column === "logprobs" ? "−" : both ? "+" : ""}${formatNumber(scale)}</span></span>`;
}
