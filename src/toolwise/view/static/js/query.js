// Filters and sorts the rows of a bundle as the server does.

const QUERY_WORDS = ["phase", "file", "kind", "route", "stop_reason", "task_id", "group_id"];
const QUERY_FLAGS = ["correct", "trained_on", "fault", "thinking"];
const QUERY_NUMBERS = ["step", "score", "cost", "advantage", "steps", "tokens", "calls", "failed_calls"];

function matchesQuery(row, params) {
  for (const name of QUERY_WORDS) if (params[name] && ![params[name], ...params[name].split("|")].includes(row[name] ?? "")) return false;
  for (const name of QUERY_FLAGS) if (params[name] && row[name] !== (params[name] === "true")) return false;
  for (const name of QUERY_NUMBERS) {
    const low = params[`${name}_min`], high = params[`${name}_max`];
    if (low && !(row[name] !== null && row[name] >= Number(low))) return false;
    if (high && !(row[name] !== null && row[name] <= Number(high))) return false;
  }
  return !params.tool || row.tools.includes(params.tool);
}

export function queryRows(name, rows, params, texts) {
  const needle = JSON.stringify(params.q || "").slice(1, -1).toLowerCase(); // the texts are as they are stored, in JSON
  const found = rows.filter((row) => matchesQuery(row, params) && (!needle || (texts[`${row.file} ${row.rollout_id}`] || "").includes(needle)));
  if (name === "points") {
    const columns = { total: found.length, x: params.x, y: params.y, points: {} };
    for (const column of [params.x, params.y, "file", "rollout_id", "correct"]) columns.points[column] = found.map((row) => row[column]);
    return columns;
  }
  const sort = params.sort, sign = params.desc === "true" ? -1 : 1;
  const order = found.map((row, index) => [row, index]);
  order.sort(([a, i], [b, j]) => {
    if (!sort) return sign * (i - j);
    const [x, y] = [a[sort], b[sort]];
    if (x === null || y === null) return (x === null) - (y === null) || i - j;
    return sign * (x < y ? -1 : x > y ? 1 : 0) || i - j;
  });
  const offset = Number(params.offset || 0);
  const shown = order.slice(offset, offset + Number(params.limit || 50)).map(([row]) => row);
  return { total: found.length, of: rows.length, offset, rows: shown };
}
