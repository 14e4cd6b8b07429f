
"use strict";
// Draws what `pdcluster/status` says, again and again. Words of clients and engines become text, never markup.
(() => {
  const EVERY_MS = 2000;
  const PATIENCE_MS = 10000;
  const KINDS = {
    read: "body comes", turn: "waits for its turn", queue: "waits to be admitted",
    decode_sent: "decode's queue and reservation", reserved: "a prefill engine is chosen",
    prefills_locally: "decode computes the prompt", prefill_sent: "to prefill and back, or all of prefill",
    prefill_queued: "prefill's queue", prefill_computes: "prefill's compute and push",
    prefill_replied: "rest of the push, first step", first_byte: "answer", failure: "after a failure",
  };
  const byId = (id) => document.getElementById(id);
  const made = (tag, text = "", kind = "") => {
    const element = document.createElement(tag);
    element.textContent = text;
    element.className = kind;
    return element;
  };
  const word = (text) => made("td", text, "word");
  const seconds = (s) => s === undefined || s === null ? "" : s < 1 ? `${(1000 * s).toFixed(1)} ms` : `${s.toFixed(2)} s`;
  const counts = (numbers) => Object.entries(numbers).filter(([, n]) => n).map(([name, n]) => `${name} ${n}`).join(", ") || "none";
  const row = (cells) => {
    const line = made("tr");
    line.append(...cells.map((cell) => cell instanceof Node ? cell : made("td", `${cell}`)));
    return line;
  };
  const filled = (id, rows) => byId(id).replaceChildren(...rows);

  const facts = (pool) => [
    ["requests", `${pool.requests.running} run, wait for: ${counts(pool.requests.queued)}`],
    ["backlog, tokens", counts(pool.requests.backlog_tokens)],
    ["ended since the start", counts(pool.ended)],
    [`failures of the last ${pool.failures.seconds.toFixed(0)} s`, counts(pool.failures.kinds)],
    ["policy", pool.policy],
    ["engines from", pool.discovery.kind + (pool.discovery.is_current === false ? `, not current: ${pool.discovery.reason}` : "")],
    ...pool.revisions.map((one) => [`revision ${one.revision || "-"}`, `${one.serves ? "gets requests" : "gets none"}, serving: ${counts(one.serving)}`]),
  ];
  const engineRow = (one) => row([
    one.name, one.state, made("td", one.healthy ? "well" : "silent", one.healthy ? "" : "bad"),
    made("td", one.circuit + (one.ejected_s ? ` for ${seconds(one.ejected_s)}` : "") + (one.ejections ? `, ejected ${one.ejections} times` : ""), one.circuit === "closed" ? "" : "bad"),
    one.slow_start_s ? seconds(one.slow_start_s) : "", one.running, one.outstanding_tokens, one.revision || "-",
    word(one.pod || one.url), word(one.last_failure ? `${one.last_failure} (${seconds(one.last_failure_s)} ago)` : ""),
  ]);
  const bar = (steps) => {
    const whole = made("div", "", "bar");
    const end = steps.findIndex((step) => step.kind === "first_byte");
    for (const step of end < 0 ? steps : steps.slice(0, end)) {
      const part = made("span", "", `part ${step.kind in KINDS ? step.kind : "failure"}`);
      part.style.flexGrow = `${Math.max(0, 1e6 * step.took_s)}`; // Where the sum is below 1 the bar would not be filled.
      part.title = `${seconds(step.took_s)}: ${step.text}`;
      whole.append(part);
    }
    return whole;
  };
  const requestRow = (one) => {
    const drawn = made("td");
    drawn.append(bar(one.steps || []));
    const after = one.fate === "failed" && one.outcome === "ok" ? " after a failure" : "";
    const how = `${one.status || "-"} ${one.error || one.outcome || "a bug of the router"}${after}`;
    const tokens = one.prompt_tokens === undefined ? "" : `${one.prompt_tokens} (${one.cached_tokens || 0})`;
    return row([
      `${seconds(one.ended_s)} ago`, made("td", one.request_id, "word id"), word(one.alias_of ? `${one.model} = ${one.alias_of}` : one.model || ""), word(one.client || ""), made("td", how, one.fate === "failed" ? "bad" : ""),
      tokens, seconds(one.read_s), seconds(one.first_byte_s), seconds(one.total_s), drawn,
    ]);
  };
  const show = (page) => {
    filled("facts", facts(page.pool).flatMap(([name, value]) => [made("dt", name), made("dd", value)]));
    filled("engines", page.pool.engines.map(engineRow));
    filled("requests", page.recent.map(requestRow));
  };
  const look = async () => {
    if (!document.hidden) {
      try {
        const answer = await fetch("pdcluster/status", { cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
        if (!answer.ok) throw new Error(`it answered ${answer.status}`);
        show(await answer.json());
        byId("note").replaceChildren(`As of ${new Date().toLocaleTimeString()}.`);
      } catch (error) {
        byId("note").replaceChildren(`No answer from the router at ${new Date().toLocaleTimeString()}: ${error.message}. What is shown below is older.`);
      }
    }
    setTimeout(look, EVERY_MS);
  };
  filled("legend", Object.entries(KINDS).filter(([kind]) => kind !== "first_byte").flatMap(([kind, text]) => [made("span", "", `sample ${kind}`), text]));
  look();
})();
