// A conversation: messages with thoughts, calls and results, and the tokens that were sampled below each.
import { html } from "./lib.js";
import { fetchData } from "./api.js";
import { formatNumber, formatSigned, SafeText, visibleText } from "./format.js";
import { linkTo } from "./route.js";
import { LongText, plainText } from "./text.js";

// The step of each message; counted from the end, because a prompt may contain assistant messages.
export function stepOfMessages(messages, steps) {
  const acted = messages.map((message, index) => (message.role === "assistant" ? index : -1)).filter((index) => index >= 0);
  const first = acted.length - steps.length;
  return new Map(acted.map((index, number) => [index, number - first]).filter(([, step]) => step >= 0));
}

export function Conversation({ page, where, children, compact }) {
  const steps = stepOfMessages(page.messages, page.steps);
  return html`<div class=${`conversation ${compact ? "compact" : ""}`}>${page.messages.map((message, index) => html`<${MessageView} key=${index} message=${message} index=${index} step=${steps.get(index)} page=${page} where=${where}>${steps.has(index) && children ? children(steps.get(index)) : null}</${MessageView}>`)}</div>`;
}

function MessageView({ message, index, step, page, where, children }) {
  const record = step === undefined ? null : page.steps[step];
  const load = (field) => () => fetchData("message", { ...where, index }).then((full) => field(full));
  return html`<article class=${`message ${message.role}`}>
    <header><b>${message.role === "tool" ? "result" : visibleText(message.role)}</b>${message.name && html` <code><${SafeText} text=${message.name} /></code>`}
      ${record && html`<span class="muted"> step ${step}</span>`}
      ${record?.advantage !== null && record?.advantage !== undefined && html` <span class=${`pill ${record.advantage > 0 ? "good" : record.advantage < 0 ? "bad" : ""}`} title="mean advantage of the step">A ${formatSigned(record.advantage)}</span>`}
      ${record?.return_to_go !== undefined && record?.return_to_go !== null && html` <span class="pill" title="return from here on">G ${formatNumber(record.return_to_go)}</span>`}
      ${record?.base_reward !== undefined && record?.base_reward !== null && html` <span class="pill" title="reward of the step">r ${formatSigned(record.base_reward)}</span>`}
      ${record?.anchor !== undefined && record?.anchor !== null && html` <a class="pill" href=${linkTo("anchors", { run: where.run, file: where.file, group: page.row.group_id, id: page.row.rollout_id, state: record.anchor })} title="all steps of the group in this state">state ${record.anchor}</a>`}</header>
    ${message.thought && html`<div class="thought"><span class="label">thought</span><${LongText} text=${message.thought} loadAll=${load((full) => full.thought)} /></div>`}
    <${LongText} text=${message.text} loadAll=${load((full) => full.text)} />
    ${message.calls.map((call, number) => html`<div class="call"><span class="label">call</span><code class="name"><${SafeText} text=${call.name} /></code><${LongText} className="mono" text=${call.arguments} loadAll=${load((full) => full.calls[number].arguments)} /></div>`)}
    ${children}</article>`;
}

export function messageLine(message) {
  const calls = message.calls.map((call) => `${call.name}(${plainText(call.arguments)})`).join(" ");
  return [plainText(message.thought), plainText(message.text), calls].filter(Boolean).join(" ");
}
