// Reads the data of a page from the server, or from the files of a bundle.
import { useState, useEffect, useContext, createContext } from "./lib.js";
import { bundleAnswer } from "./bundle.js";

export const Live = createContext({ runs: [], tick: 0 });

export async function fetchData(name, params = {}) {
  if (window.TOOLWISE_BUNDLE) return bundleAnswer(name, params);
  const response = await fetch(`api/${name}?${new URLSearchParams(params)}`);
  const data = await response.json();
  if (!response.ok) throw new Error(data.error || `the server answered ${response.status}`);
  return data;
}

// The data of a page; read again when the run has changed. Old data stays while new data is on its way.
export function useData(name, params) {
  const { runs } = useContext(Live);
  const signature = runs.filter((run) => [params?.run, params?.other_run].includes(String(run.run))).map((run) => run.signature).join();
  const key = params && JSON.stringify([name, params]);
  const [state, setState] = useState({});
  useEffect(() => {
    if (!params) return undefined;
    let current = true;
    const done = (result) => current && setState({ key, ...result });
    fetchData(name, params).then((data) => done({ data }), (error) => done({ error: error.message }));
    return () => { current = false; };
  }, [key, signature]);
  const fits = state.key === key;
  return { data: state.data, error: fits ? state.error : undefined, loading: !fits, fits };
}
