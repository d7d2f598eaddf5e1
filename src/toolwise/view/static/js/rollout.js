// One rollout: the conversation, its tokens, and why it was credited as it was.
import { html, useLayoutEffect, useMemo, useState } from "./lib.js";
import { useData } from "./api.js";
import { Conversation } from "./conversation.js";
import { Choice, formatNumber, formatSigned, markOf, SafeText, stepName, visibleText } from "./format.js";
import { goTo, linkTo } from "./route.js";
import { LongText } from "./text.js";
import { COLOURINGS, Legend, TokenDetail, TokenStrip, scaleOf, versionsOf } from "./tokens.js";

export function RolloutPage({ params }) {
  const run = params.run ?? "0";
  const where = { run, file: params.file ?? "", id: params.id ?? "" };
  const { data, error, fits } = useData("rollout", where);
  const [hovered, setHovered] = useState(null);
  const column = params.colour || "advantages";
  const tokens = data?.tokens ?? [];
  const pinned = useMemo(() => {
    const match = /^(\d+)\.(\d+)$/.exec(params.token ?? "");
    return match ? { step: Number(match[1]), index: Number(match[2]) } : null;
  }, [params.token]);
  const selected = hovered ?? pinned;
  const set = (changes) => goTo("rollout", { ...params, ...changes }, true);
  const select = (step, index, pin) => { if (pin) { setHovered(null); set({ token: `${step}.${index}` }); } else setHovered({ step, index }); };
  const sibling = (by) => {
    const place = data.siblings.findIndex((one) => one.rollout_id === params.id);
    const next = data.siblings[place + by];
    if (next) goTo("rollout", { run, file: next.file, id: next.rollout_id, colour: params.colour });
  };
  useLayoutEffect(() => {
    const pressed = (event) => {
      if (!data || event.target.closest("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "[") sibling(-1);
      else if (event.key === "]") sibling(1);
      else if (/^[1-7]$/.test(event.key)) set({ colour: COLOURINGS[event.key - 1][0] });
      else if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
        const next = moveToken(tokens, selected, event.key === "ArrowRight" ? 1 : -1);
        if (next) { event.preventDefault(); select(next.step, next.index, true); }
      }
    };
    window.addEventListener("keydown", pressed);
    return () => window.removeEventListener("keydown", pressed);
  });
  if (error) return html`<p class="error">${error}</p>`;
  if (!data || !fits) return html`<p class="empty">Loading …</p>`;
  const { row } = data;
  const scale = scaleOf(tokens, column), versions = versionsOf(tokens);
  const chosen = selected && tokens.find((step) => step.step === selected.step);
  return html`<nav class="crumbs"><a href=${linkTo("rollouts", { run })}>Rollouts</a> › <a href=${linkTo("rollouts", { run, file: row.file })}>${stepName(row.file)}</a> › <span><${SafeText} text=${row.rollout_id} /></span></nav>
    <h1 class="question" dir="auto"><${SafeText} text=${row.question} /></h1>
    <nav class="tabs" aria-label="Views of this rollout"><${RolloutTabs} page="rollout" run=${run} row=${row} /></nav>
    <div class="with-side"><div>
      ${tokens.length > 0 && html`<div class="colouring"><${Choice} label="colour tokens by" value=${column} options=${COLOURINGS.map(([name, label], index) => [name, `${label} (${index + 1})`])} onChange=${(colour) => set({ colour })} /> <${Legend} column=${column} scale=${scale} versions=${versions} /></div>`}
      <${Conversation} page=${data} where=${where}>${(step) => {
        const stored = tokens.find((one) => one.step === step);
        return stored && html`<${TokenStrip} step=${stored} column=${column} scale=${scale} versions=${versions} selected=${selected} onSelect=${select} />`;
      }}</${Conversation}>
      ${!tokens.length && html`<p class="note">The tokens of this rollout are not stored: <code>[records]</code> says how much of a run is kept; runs of other programs have none.</p>`}
    </div><aside>
      ${tokens.length > 0 && html`<section class="card sticky"><h2>Token</h2><${TokenDetail} step=${chosen} index=${selected?.index} /></section>`}
      <section class="card"><h2>Outcome</h2><${Outcome} data=${data} /></section>
      <section class="card"><h2>Group</h2><${Siblings} data=${data} run=${run} /></section>
    </aside></div>`;
}

function moveToken(tokens, from, by) {
  const all = tokens.flatMap((step) => step.texts.map((_, index) => ({ step: step.step, index })));
  const place = from ? all.findIndex((one) => one.step === from.step && one.index === from.index) : by > 0 ? -1 : all.length;
  return all[place + by];
}

export function RolloutTabs({ page, run, row }) {
  const rollout = { run, file: row.file, id: row.rollout_id }, group = { run, file: row.file, group: row.group_id, id: row.rollout_id };
  const tabs = [["rollout", "Conversation", rollout], ["group", "Group", group], ["anchors", "Same states", group], ["router", "Route", rollout], ["thinking", "Thinking", rollout]];
  return tabs.map(([name, label, params]) => html`<a class=${name === page ? "on" : ""} aria-current=${name === page ? "page" : undefined} href=${linkTo(name, params)}>${label}</a>`);
}

function countsText(counts) {
  return Object.entries(counts).map(([name, count]) => `${visibleText(name)} ${count}`).join(", ");
}

function Outcome({ data }) {
  const { row } = data;
  const line = (label, value) => value !== null && value !== undefined && value !== "" && html`<tr><td>${label}</td><td>${value}</td></tr>`;
  return html`<table class="figures outcome"><tbody>
    ${line("score", html`<b data-score=${row.score}>${formatNumber(row.score)}</b> ${markOf(row.correct)}`)}
    ${Object.entries(data.metrics).map(([name, value]) => line(visibleText(name), formatNumber(value)))}
    ${line("cost", formatNumber(row.cost, 2))} ${line("ended", visibleText(row.stop_reason))} ${line("kind", visibleText(row.kind))} ${line("route", visibleText(row.route))} ${line("answered by", visibleText(row.answered_by))}
    ${line("calls", countsText(data.calls))} ${line("failed calls", countsText(data.failed_calls))}
    ${line("tokens", row.tokens)} ${line("trained on", row.trained_on === null ? "" : row.trained_on ? "yes" : "no")}</tbody></table>
    ${data.reason && html`<h4>Reason</h4><${LongText} text=${data.reason} />`}
    ${data.ground_truth && data.ground_truth !== "null" && html`<h4>Expected</h4><${LongText} text=${data.ground_truth} />`}
    ${data.fault && html`<h4>Fault</h4><${LongText} className="bad" text=${data.fault} />`}
    ${data.error && html`<h4>The reward failed</h4>${Object.values(data.error).map((text) => html`<${LongText} className="bad mono" text=${text} />`)}`}
    ${data.warnings.map((warning) => html`<${LongText} className="bad" text=${warning} />`)}`;
}

function Siblings({ data, run }) {
  return html`<ul class="siblings">${data.siblings.map((one) => html`<li class=${one.rollout_id === data.row.rollout_id ? "on" : ""}><a href=${linkTo("rollout", { run, file: one.file, id: one.rollout_id })}><span>${markOf(one.correct)} ${formatNumber(one.score)}</span><span class="muted">cost ${formatNumber(one.cost, 2)}</span><span class=${one.advantage > 0 ? "good" : one.advantage < 0 ? "bad" : "muted"}>A ${formatSigned(one.advantage)}</span></a></li>`)}</ul>
    <p class="note">[ and ] go to the one before and after.</p>`;
}
