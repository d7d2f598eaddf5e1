// A group as a tree of messages, and its steps by the state they were taken in.
import { html } from "./lib.js";
import { useData } from "./api.js";
import { messageLine } from "./conversation.js";
import { formatNumber, formatSigned, markOf, SafeText, stepName, visibleText } from "./format.js";
import { linkTo } from "./route.js";
import { RolloutTabs } from "./rollout.js";
import { PART_LABELS } from "./tokens.js";

function GroupHeader({ page, params, data }) {
  const row = { file: params.file, rollout_id: params.id ?? data.rollouts?.[0]?.rollout_id ?? data.states?.[0]?.steps[0]?.rollout_id, group_id: params.group };
  return html`<nav class="crumbs"><a href=${linkTo("rollouts", { run: params.run })}>Rollouts</a> › <a href=${linkTo("rollouts", { run: params.run, file: params.file })}>${stepName(params.file)}</a> › <span><${SafeText} text=${params.group} /></span></nav>
    <h1 class="question" dir="auto"><${SafeText} text=${data.question} /></h1>
    ${row.rollout_id && html`<nav class="tabs" aria-label="Views of this rollout"><${RolloutTabs} page=${page} run=${params.run ?? "0"} row=${row} /></nav>`}`;
}

export function GroupPage({ params }) {
  const { data, error, fits } = useData("group", { run: params.run ?? "0", file: params.file ?? "", group: params.group ?? "" });
  if (error) return html`<p class="error">${error}</p>`;
  if (!data || !fits) return html`<p class="empty">Loading …</p>`;
  const scores = data.rollouts.map((one) => one.score).filter((score) => score !== null);
  return html`<${GroupHeader} page="group" params=${params} data=${data} />
    <p class="muted">${data.total} rollouts of task <${SafeText} text=${data.task_id} />, mean score ${formatNumber(scores.reduce((a, b) => a + b, 0) / (scores.length || 1))}. What they share is there once.</p>
    <div class="tree card">${data.tree.children.map((node) => html`<${TreeNode} node=${node} params=${params} />`)}</div>`;
}

function leavesOf(node) {
  return [...node.leaves, ...node.children.flatMap(leavesOf)];
}

function TreeNode({ node, params }) {
  const leaves = leavesOf(node), scores = leaves.map((leaf) => leaf.score).filter((score) => score !== null);
  const mean = scores.reduce((a, b) => a + b, 0) / (scores.length || 1);
  return html`<details open class="node"><summary><span class="count" title="rollouts that go this way">${leaves.length}</span> <span class="muted">mean score ${formatNumber(mean)}</span></summary>
    ${node.messages.map((message) => html`<p class=${`line ${message.role}`}><b>${message.role === "tool" ? "result" : visibleText(message.role)}</b> <span dir="auto"><${SafeText} text=${messageLine(message)} /></span></p>`)}
    ${node.leaves.map((leaf) => html`<p class=${`leaf ${leaf.rollout_id === params.id ? "on" : ""}`}><a href=${linkTo("rollout", { run: params.run, file: leaf.file, id: leaf.rollout_id })}>${markOf(leaf.correct)} score <b>${formatNumber(leaf.score)}</b></a>
      <span>cost ${formatNumber(leaf.cost, 2)}</span>${leaf.return !== null && html`<span data-return=${leaf.return}>return ${formatNumber(leaf.return)}</span>`}<span data-advantage=${leaf.advantage} class=${leaf.advantage > 0 ? "good" : leaf.advantage < 0 ? "bad" : ""}>A ${formatSigned(leaf.advantage)}</span><span class="muted">${visibleText(leaf.stop_reason)}</span></p>`)}
    ${node.children.length > 0 && html`<div class="children">${node.children.map((child) => html`<${TreeNode} node=${child} params=${params} />`)}</div>`}</details>`;
}

export function AnchorsPage({ params }) {
  const { data, error, fits } = useData("anchors", { run: params.run ?? "0", file: params.file ?? "", group: params.group ?? "" });
  if (error) return html`<p class="error">${error}</p>`;
  if (!data || !fits) return html`<p class="empty">Loading …</p>`;
  const chosen = params.state !== undefined ? data.states.filter((state) => String(state.anchor) === params.state) : data.states;
  return html`<${GroupHeader} page="anchors" params=${params} data=${data} />
    ${data.states.length === 0 ? html`<p class="empty">The estimator of this run compares whole rollouts, not the steps of a state; GiGPO and HGPO do.</p>` : html`
      <p class="muted">${data.states.length} states in this group, ${data.alone ? `${data.alone} of them met once: their steps have nothing to be compared with` : "each met more than once"}. ${params.state !== undefined && html`<a href=${linkTo("anchors", { ...params, state: undefined })}>all states</a>`}</p>
      ${chosen.map((state) => html`<${StateCard} state=${state} params=${params} />`)}`}`;
}

function StateCard({ state, params }) {
  const names = [...new Set(state.steps.flatMap((step) => Object.keys(step.parts)))];
  const steps = [...state.steps].sort((a, b) => (b.return_to_go ?? 0) - (a.return_to_go ?? 0));
  return html`<section class=${`card state ${state.steps.length === 1 ? "alone" : ""}`} data-anchor=${state.anchor}>
    <h2><a href=${linkTo("anchors", { ...params, state: state.anchor })}>State ${state.anchor}</a> ${state.steps.length === 1 ? html`<span class="pill warn">met once</span>` : html`<span class="pill">${state.steps.length} steps</span>`}</h2>
    <p class="line"><span class="muted">saw</span> <span dir="auto"><${SafeText} text=${state.steps[0].saw} /></span></p>
    <div class="scroll"><table class="figures"><thead><tr><th>did</th><th class="number">return</th>${names.map((name) => html`<th class="number">${PART_LABELS[name] ?? name}</th>`)}<th class="number">advantage</th><th class="number">score</th><th></th></tr></thead>
      <tbody>${steps.map((step) => html`<tr class=${step.rollout_id === params.id ? "on" : ""} data-rollout=${step.rollout_id} data-index=${step.index} data-return=${step.return_to_go} data-advantage=${step.advantage}><td class="did" dir="auto"><${SafeText} text=${step.did} /></td><td class="number">${formatNumber(step.return_to_go)}</td>
        ${names.map((name) => html`<td class="number">${formatSigned(step.parts[name])}</td>`)}<td class=${`number ${step.advantage > 0 ? "good" : step.advantage < 0 ? "bad" : ""}`}>${formatSigned(step.advantage)}</td><td class="number">${formatNumber(step.score)}</td>
        <td><a href=${linkTo("rollout", { run: params.run, file: step.file, id: step.rollout_id, token: `${step.index}.0` })}>step ${step.index}</a></td></tr>`)}</tbody></table></div></section>`;
}
