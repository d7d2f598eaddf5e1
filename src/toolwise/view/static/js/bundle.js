// The data of a bundle: a folder that is opened without a server. Its scripts hold what the server would answer.
import { queryRows } from "./query.js";

const waiting = new Map();
const loaded = new Map();

function loadScript(path) {
  if (!loaded.has(path)) {
    loaded.set(path, new Promise((resolve, reject) => {
      waiting.set(path, resolve);
      const script = document.createElement("script");
      script.src = `data/${path}.js`;
      script.onerror = () => reject(new Error(`data/${path}.js: cannot be read`));
      document.head.append(script);
    }));
  }
  return loaded.get(path);
}

if (window.TOOLWISE_BUNDLE) window.TOOLWISE_DATA = (path, value) => waiting.get(path)?.(value);

async function findGroup(run, file, matches) {
  const { rows, groups } = await loadScript(`${run}/rows`);
  const row = rows.find((one) => one.file === file && matches(one));
  if (!row) throw new Error("this rollout is not in the bundle");
  return (await loadScript(`${run}/groups-${groups[row.file][row.group_id]}`))[row.group_id];
}

async function searchable(run) {
  const { chunks } = await loadScript(`${run}/rows`);
  const texts = {};
  for (let chunk = 0; chunk < chunks; chunk += 1) Object.assign(texts, (await loadScript(`${run}/text-${chunk}`)));
  return texts;
}

export async function bundleAnswer(name, params) {
  const run = params.run ?? "0";
  if (!/^\d+$/.test(run)) throw new Error(`there is no run ${run}`); // it is a part of a path
  if (name === "runs") return window.TOOLWISE_BUNDLE.runs;
  if (name === "overview" || name === "facets") return (await loadScript(`${run}/overview`))[name];
  if (name === "series") {
    const series = (await loadScript(`${run}/overview`)).series;
    return Object.fromEntries(params.names.split("|").filter((one) => series[one]).map((one) => [one, series[one]]));
  }
  if (name === "rollouts" || name === "points") {
    const { rows } = await loadScript(`${run}/rows`);
    return queryRows(name, rows, params, params.q ? await searchable(run) : null);
  }
  if (name === "rollout" || name === "router") {
    const { rollouts, routes } = await findGroup(run, params.file, (row) => row.rollout_id === params.id);
    const { rollout, router } = rollouts[params.id];
    return name === "rollout" ? rollout : { ...(await loadScript(`${run}/overview`)).router, ...router, task: routes[rollout.row.task_id] };
  }
  if (name === "message") {
    const texts = (await findGroup(run, params.file, (row) => row.rollout_id === params.id)).rollouts[params.id].full;
    return texts[params.index];
  }
  if (name === "group" || name === "anchors") return (await findGroup(run, params.file, (row) => row.group_id === params.group))[name];
  if (name === "compare") {
    const pairs = await loadScript("compare");
    const found = pairs[[run, params.file, params.other_run, params.other_file].join("|")];
    if (!found) throw new Error("the bundle compares the first and the last validation of each run only");
    return found;
  }
  throw new Error(`there is no page ${name}`);
}
