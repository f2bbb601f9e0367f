"use strict";
// Draws the pictures that come over server-sent events. They are read with fetch rather than EventSource, because only fetch can
// send the operator's key. Text goes into the page as text, never as markup: names of workers and requests are not ours.
(() => {
  const HISTORY = 120;
  const MAX_RETRY_S = 10;
  const SVG = "http://www.w3.org/2000/svg";
  const THEMES = ["auto", "light", "dark"];
  const TERMS = ["queue", "transfer", "prefill"];
  const OBJECTIVES = { met: "met", missed_ttft: "first token late", missed_tbt: "tokens too slow", rejected: "refused" };
  const $ = (id) => document.getElementById(id);
  let key = null;
  let paused = false;
  let latest = null;
  let selected = null; // id of the decision that was chosen; null follows the newest
  let stream = null;
  const history = [];

  // --- words and numbers

  const round = (value, digits = 3) => Number(value.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 6 });
  const seconds = (value) => (value == null ? "?" : value < 0.9995 ? `${round(value * 1000)} ms` : `${round(value)} s`);
  const count = (value) => (value >= 1e6 ? `${round(value / 1e6)}M` : value >= 1e4 ? `${round(value / 1e3)}k` : round(value, 4));
  const percent = (part, whole) => (whole ? `${round((100 * part) / whole)} %` : "-");
  const ago = (value) => (value < 1 ? "now" : value < 120 ? `${Math.floor(value)} s` : `${Math.floor(value / 60)} min`);
  const words = (name) => name.replaceAll("_", " ");

  // --- building blocks

  function element(name, attributes = {}, ...children) {
    const made = document.createElement(name);
    for (const [attribute, value] of Object.entries(attributes)) made.setAttribute(attribute, value);
    made.append(...children);
    return made;
  }

  function shape(name, attributes, text) {
    const made = document.createElementNS(SVG, name);
    for (const [attribute, value] of Object.entries(attributes)) made.setAttribute(attribute, value);
    if (text !== undefined) made.textContent = text;
    return made;
  }

  /** A bar of parts `[class, share of the whole]`. */
  function bar(parts, label) {
    const made = element("div", label ? { class: "bar", role: "img", "aria-label": label } : { class: "bar", "aria-hidden": "true" });
    for (const [kind, share] of parts) {
      const part = element("span", { class: kind });
      part.style.width = `${Math.min(100, 100 * share)}%`;
      made.append(part);
    }
    return made;
  }

  const line = (left, right) => element("div", { class: "line" }, left, element("span", { class: "muted" }, right));

  function empty(section, isEmpty) {
    $(section).classList.toggle("is-empty", isEmpty);
    return isEmpty;
  }

  // --- tiles

  function remember(picture) {
    const gateway = picture.gateway;
    const before = history.at(-1);
    const now = { at: performance.now() / 1000, output: gateway.output_tokens, in_flight: gateway.in_flight };
    now.waiting = gateway.waiting_for_turn + (picture.counters.waiting ?? 0) + gateway.waiting_for_first_token;
    now.rate = before && now.output >= before.output ? (now.output - before.output) / Math.max(0.05, now.at - before.at) : 0;
    const hits = Object.values(picture.overview?.workers ?? {});
    now.prompt = hits.reduce((sum, worker) => sum + worker.prompt_tokens, 0);
    now.hit = hits.reduce((sum, worker) => sum + worker.reused_tokens, 0);
    now.hit_share = now.prompt ? now.hit / now.prompt : 0;
    history.push(now);
    if (history.length > HISTORY) history.shift();
    return now;
  }

  function sparkline(field, most) {
    const values = history.map((entry) => entry[field]);
    const top = most ?? Math.max(...values, 1e-9);
    const points = values.map((value, at) => `${(100 * at) / Math.max(1, values.length - 1)},${25 - (23 * value) / top}`);
    const made = shape("svg", { viewBox: "0 0 100 26", preserveAspectRatio: "none", "aria-hidden": "true" });
    made.append(shape("polyline", { points: points.join(" ") }));
    return made;
  }

  function tile(name, value, unit, field, most) {
    const shown = element("div", { class: "value" }, value, element("small", {}, unit ? ` ${unit}` : ""));
    const made = element("div", { class: "tile" }, element("div", { class: "name" }, name), shown);
    if (field) made.append(sparkline(field, most));
    return made;
  }

  function drawTiles(picture) {
    const now = remember(picture);
    const objectives = picture.overview?.objectives ?? {};
    const judged = (objectives.met ?? 0) + (objectives.missed_ttft ?? 0) + (objectives.missed_tbt ?? 0);
    const workers = Object.values(picture.workers);
    $("tiles").replaceChildren(
      tile("In flight", count(now.in_flight), "requests", "in_flight"),
      tile("Without a first token", count(now.waiting), "requests", "waiting"),
      tile("Output", count(now.rate), "tokens/s", "rate"),
      tile("Prompt tokens from cache", percent(now.hit, now.prompt), "", "hit_share", 1),
      tile("Objectives met", percent(objectives.met ?? 0, judged), judged ? `of ${count(judged)}` : ""),
      tile("Workers", count(workers.length), workers.some((worker) => worker.draining) ? "some draining" : ""),
    );
  }

  // --- workers

  function drawWorkers(picture) {
    const first = (id) => (picture.workers[id].role === "decode" ? 1 : 0);
    const ids = Object.keys(picture.workers).sort((a, b) => first(a) - first(b) || (a < b ? -1 : 1));
    const table = $("workers").querySelector("table");
    for (const body of [...table.tBodies]) body.remove();
    if (empty("workers", ids.length === 0)) return;
    const longest = Math.max(0.001, ...ids.map((id) => picture.workers[id].prefill_queue_s ?? 0));
    const nodes = Map.groupBy(ids, (id) => picture.workers[id].node ?? "");
    for (const [node, members] of nodes) {
      const body = table.createTBody();
      body.append(element("tr", {}, element("th", { class: "node", colspan: "4", scope: "rowgroup" }, `node ${node || "unnamed"}`)));
      for (const id of members) body.append(workerRow(id, picture.workers[id], picture.overview?.workers[id] ?? {}, longest));
    }
  }

  function workerRow(id, worker, seen, longest) {
    const name = element("th", { scope: "row" }, element("div", {}, id), element("span", { class: "chip" }, worker.role ?? "worker"));
    if (worker.draining) name.append(element("span", { class: "chip warn" }, "draining"));
    if (worker.prefill_calibrated === false) name.append(element("span", { class: "chip" }, "not calibrated"));
    const cell = (label, ...children) => element("td", { "data-name": label }, ...children);
    return element("tr", {}, name, cell("Queue", ...queueOf(worker, longest)), cell("Cache by tier", ...tiersOf(worker, seen)), cell("Hits", ...hitsOf(seen)));
  }

  function queueOf(worker, longest) {
    const shown = [];
    if (worker.prefill_queue_s !== undefined) {
      shown.push(line(`${count(worker.prefill_jobs ?? 0)} to prefill`, seconds(worker.prefill_queue_s)));
      shown.push(bar([["queue", worker.prefill_queue_s / longest]]));
    }
    if (worker.decode_requests !== undefined) shown.push(line(`${count(worker.decode_requests)} decoding`, `batch ${count(worker.decode_batch ?? 0)}`));
    return shown.length ? shown : ["-"];
  }

  function tiersOf(worker, seen) {
    const shown = [];
    for (const [tier, { blocks, capacity }] of Object.entries(seen.tiers ?? {})) {
      shown.push(line(tier, `${count(blocks)} of ${count(capacity)} blocks`));
      shown.push(bar([["fill", capacity ? blocks / capacity : 0]], `${tier}: ${percent(blocks, capacity)} of its blocks hold known prefixes`));
    }
    return shown.length ? shown : ["-"];
  }

  function hitsOf(seen) {
    if (!seen.placed) return ["-"];
    const share = seen.prompt_tokens ? seen.reused_tokens / seen.prompt_tokens : 0;
    return [line(percent(seen.reused_tokens, seen.prompt_tokens), `${count(seen.placed)} requests`), bar([["met", share]])];
  }

  // --- objectives and refusals

  function drawObjectives(picture) {
    const overview = picture.overview;
    const parts = Object.entries(OBJECTIVES).map(([kind, label]) => [kind, label, overview?.objectives?.[kind] ?? 0]);
    const total = parts.reduce((sum, part) => sum + part[2], 0);
    $("objectives-note").textContent = overview ? `The last ${count(overview.requests)} requests, ${ago(overview.window_s)}.` : "";
    const label = parts.map(([, name, value]) => `${name} ${percent(value, total)}`).join(", ");
    const made = bar(parts.map(([kind, , value]) => [kind, total ? value / total : 0]), label);
    made.id = "objectives-bar";
    made.classList.add("tall");
    $("objectives-bar").replaceWith(made);
    $("objectives-legend").replaceChildren(
      ...parts.map(([kind, name, value]) => element("li", {}, element("i", { class: `swatch ${kind}` }), `${name} ${count(value)}`)),
    );
    drawRejections(picture);
  }

  function drawRejections(picture) {
    const reasons = { ...picture.gateway.rejections };
    for (const [reason, value] of Object.entries(picture.overview?.rejections ?? {})) reasons[reason] = Math.max(value, reasons[reason] ?? 0);
    const sorted = Object.entries(reasons).sort((a, b) => b[1] - a[1]);
    const most = Math.max(1, ...sorted.map((entry) => entry[1]));
    $("rejections").replaceChildren(
      ...sorted.flatMap(([reason, value]) => [
        element("dt", { class: "line" }, words(reason), element("span", {}, count(value))),
        element("dd", {}, bar([["", value / most]])),
      ]),
    );
    empty("objectives", sorted.length === 0);
  }

  // --- decisions

  const totalOf = (candidate) => TERMS.reduce((sum, term) => sum + (candidate[`${term}_s`] ?? 0), 0);
  const partsOf = (candidate, most) => TERMS.map((term) => [term, (candidate[`${term}_s`] ?? 0) / most]);
  const isSelected = (row, at) => (selected === null ? at === 0 : row.request_id === selected);

  function outcomeOf(row) {
    if (row.decision === "rejected") return ["refused", words(row.rejection.reason)];
    if (["stop", "length"].includes(row.actual.outcome)) return ["", "finished"];
    const outcome = row.actual.outcome ?? (row.actual.ttft_s === null ? "placed" : "decoding");
    return [["failed", "rejected_late"].includes(outcome) ? "failed" : "", words(outcome)];
  }

  function drawDecisions(picture) {
    const rows = picture.overview?.decisions ?? [];
    if (empty("decisions", rows.length === 0)) return;
    if (!rows.some((row) => row.request_id === selected)) selected = null;
    const list = $("decision-list");
    const hadFocus = list.contains(document.activeElement);
    const top = list.scrollTop;
    list.replaceChildren(...rows.map(decisionItem));
    list.scrollTop = top;
    if (hadFocus) list.querySelector("[aria-selected=true]").focus({ preventScroll: true });
    drawDecision(rows.find(isSelected));
  }

  function decisionItem(row, at) {
    const [kind, outcome] = outcomeOf(row);
    const chosen = isSelected(row, at);
    const made = element("li", { role: "option", id: `decision-${at}`, "aria-selected": chosen, tabindex: chosen ? 0 : -1, "data-id": row.request_id });
    const where = row.prefill ? `${row.prefill} \u2192 ${row.decode ?? "?"}` : "";
    const what = element("span", {}, element("span", { class: `outcome ${kind}` }, outcome), ` ${count(row.prompt_tokens)} tokens`);
    made.append(element("div", { class: "line" }, what, element("span", { class: "muted" }, ago(row.ago_s))));
    if (where) made.append(element("div", { class: "muted line" }, where));
    const most = Math.max(1e-9, ...(row.candidates ?? []).map(totalOf));
    for (const candidate of row.candidates ?? []) made.append(bar(partsOf(candidate, most)));
    return made;
  }

  function drawDecision(row) {
    const candidates = row.candidates ?? [];
    const actual = row.actual.ttft_s;
    const most = Math.max(1e-9, actual ?? 0, ...candidates.map(totalOf));
    $("decision").replaceChildren(element("h3", { class: "mono" }, row.request_id), facts(row), ...candidates.map((candidate) => candidateRow(candidate, row, most)));
    if (row.candidates_left_out) $("decision").append(element("p", { class: "note" }, `and ${row.candidates_left_out} more candidates`));
  }

  function facts(row) {
    const [kind, outcome] = outcomeOf(row);
    const shown = [["", element("b", { class: `outcome ${kind}` }, outcome)], ["prompt", `${count(row.prompt_tokens)} tokens`]];
    if (row.reuse) shown.push(["reused", `${count(row.actual.reused_tokens ?? row.reuse.local_tokens + row.reuse.fetched_tokens)} tokens`]);
    if (row.ttft) shown.push(["predicted", seconds(row.ttft.total_s)]);
    if (row.actual.ttft_s !== null) shown.push(["took", seconds(row.actual.ttft_s)]);
    if (row.ttft_slo_s !== null) shown.push(["objective", seconds(row.ttft_slo_s)]);
    if (row.attempt > 1) shown.push(["attempt", String(row.attempt)]);
    const made = element("div", { class: "facts" }, ...shown.map(([name, value]) => element("span", {}, name ? `${name} ` : "", value instanceof Node ? value : element("b", {}, value))));
    if (row.rejection) made.append(element("span", { class: "note" }, row.rejection.message));
    return made;
  }

  function candidateRow(candidate, row, most) {
    const chosen = candidate.chosen && row.decision === "placed";
    const made = element("div", { class: chosen ? "candidate chosen" : "candidate" });
    const terms = TERMS.map((term) => `${term} ${seconds(candidate[`${term}_s`])}`).join(", ");
    const reused = candidate.local_tokens + candidate.fetched_tokens;
    const from = candidate.fetched_tokens ? `, ${count(candidate.fetched_tokens)} from ${candidate.source}` : "";
    made.append(element("div", { class: "line" }, element("span", { class: "name" }, candidate.worker), element("b", {}, seconds(candidate.total_s))));
    const drawn = bar(partsOf(candidate, most), `${candidate.worker}: ${terms}`);
    if (chosen && row.actual.ttft_s !== null) {
      const tick = element("i", { class: "tick" });
      tick.style.left = `calc(${(100 * row.actual.ttft_s) / most}% - 2px)`;
      drawn.append(tick);
    }
    made.append(drawn, element("div", { class: "terms" }, `${terms} \u00b7 ${count(reused)} reused${from}`));
    return made;
  }

  function choose(id) {
    selected = id;
    if (latest) drawDecisions(latest);
    $("decision-list").querySelector("[aria-selected=true]")?.focus({ preventScroll: true });
    $("decision-list").querySelector("[aria-selected=true]")?.scrollIntoView({ block: "nearest" });
  }

  function onListKey(event) {
    const items = [...$("decision-list").children];
    const at = items.findIndex((item) => item.getAttribute("aria-selected") === "true");
    const steps = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: items.length - 1 };
    if (event.key === "Escape") choose(null);
    else if (event.key in steps) choose(items[Math.min(items.length - 1, Math.max(0, steps[event.key]))].dataset.id);
    else return;
    event.preventDefault();
  }

  // --- estimate against actual

  function drawEstimates(picture) {
    const points = (picture.overview?.estimates ?? []).filter((point) => point.predicted_s > 0 && point.actual_s > 0);
    if (empty("estimates", points.length === 0)) return;
    const errors = points.map((point) => Math.max(point.actual_s / point.predicted_s, point.predicted_s / point.actual_s) - 1).sort((a, b) => a - b);
    const middle = errors[Math.floor(errors.length / 2)];
    $("estimates-note").textContent = `Time to first token of ${count(points.length)} requests; on the dashed line the estimate was right. Median error ${percent(middle, 1)}; hollow: not calibrated.`;
    drawScatter($("scatter"), points);
  }

  /** Round values 1, 2 and 5 times a power of ten that enclose `least` and `most`. */
  function ticksAround(least, most) {
    const all = [];
    for (let power = Math.floor(Math.log10(least)) - 1; power <= Math.log10(most) + 1; power += 1) all.push(...[1, 2, 5].map((step) => step * 10 ** power));
    const from = all.findLastIndex((tick) => tick <= least);
    const to = Math.max(from + 1, all.findIndex((tick) => tick >= most));
    const ticks = all.slice(from, to + 1);
    const powers = ticks.filter((tick, at) => at === 0 || at === ticks.length - 1 || Number.isInteger(Math.round(Math.log10(tick) * 1e6) / 1e6));
    return ticks.length > 8 ? powers : ticks;
  }

  function drawScatter(svg, points) {
    const [width, height] = [Math.max(240, svg.clientWidth), Math.max(240, svg.clientHeight)];
    const [left, bottom, pad] = [58, 44, 10];
    const values = points.flatMap((point) => [point.predicted_s, point.actual_s]);
    const ticks = ticksAround(Math.min(...values), Math.max(...values));
    const [low, high] = [Math.log10(ticks[0]), Math.log10(ticks.at(-1))];
    const x = (value) => left + ((Math.log10(value) - low) / (high - low)) * (width - left - pad);
    const y = (value) => height - bottom - ((Math.log10(value) - low) / (high - low)) * (height - bottom - pad);
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.replaceChildren(...axes(ticks, x, y, height));
    for (const point of points) {
      const dot = shape("circle", { cx: x(point.predicted_s), cy: y(point.actual_s), r: 4, class: point.calibrated ? "" : "unsure" });
      dot.append(shape("title", {}, `${point.worker}: predicted ${seconds(point.predicted_s)}, took ${seconds(point.actual_s)}`));
      svg.append(dot);
    }
  }

  function axes(ticks, x, y, height) {
    const made = [];
    const [first, last] = [ticks[0], ticks.at(-1)];
    for (const value of ticks) {
      made.push(shape("line", { class: "grid", x1: x(value), x2: x(value), y1: y(first), y2: y(last) }));
      made.push(shape("line", { class: "grid", x1: x(first), x2: x(last), y1: y(value), y2: y(value) }));
      made.push(shape("text", { x: x(value), y: y(first) + 17, "text-anchor": value === last ? "end" : "middle" }, seconds(value)));
      made.push(shape("text", { x: x(first) - 7, y: y(value) + 4, "text-anchor": "end" }, seconds(value)));
    }
    const [across, up] = [(x(first) + x(last)) / 2, (y(first) + y(last)) / 2];
    made.push(shape("line", { class: "same", x1: x(first), y1: y(first), x2: x(last), y2: y(last) }));
    made.push(shape("text", { x: across, y: height - 6, "text-anchor": "middle" }, "estimated"));
    made.push(shape("text", { x: 12, y: up, transform: `rotate(-90 12 ${up})`, "text-anchor": "middle" }, "actual"));
    return made;
  }

  // --- hot prefixes

  function drawPrefixes(picture) {
    const rows = picture.overview?.hot_prefixes ?? [];
    if (empty("prefixes", rows.length === 0)) return;
    $("prefixes").querySelector("tbody").replaceChildren(...rows.map(prefixRow));
  }

  function prefixRow(row) {
    const replicas = row.replicas.map((replica) => element("span", { class: "chip" }, replica));
    return element(
      "tr",
      {},
      element("th", { scope: "row", class: "mono" }, row.prefix),
      element("td", { "data-name": "Tokens", class: "short" }, count(row.tokens)),
      element("td", { "data-name": "Hits", class: "short" }, count(row.hits)),
      element("td", { "data-name": "Last hit", class: "short" }, ago(row.last_hit_ago_s)),
      element("td", { "data-name": "Replicas" }, ...(replicas.length ? replicas : [element("span", { class: "muted" }, "evicted")])),
    );
  }

  // --- the whole

  function tell(kind, text) {
    if ($("state-text").textContent !== text) $("state-text").textContent = text;
    $("state").className = `state ${kind}`;
  }

  function draw(picture) {
    tell(picture.ready ? "good" : "bad", picture.ready ? "ready" : `not ready: ${picture.reason}`);
    const overview = picture.overview;
    $("rules").textContent = [picture.model, overview && `policy ${overview.policy}`, overview && `admission ${overview.admission}`].filter(Boolean).join(" \u00b7 ");
    for (const part of [drawTiles, drawWorkers, drawObjectives, drawDecisions, drawEstimates, drawPrefixes]) part(picture);
    document.body.dataset.pictures = String(Number(document.body.dataset.pictures ?? 0) + 1);
  }

  function take(picture) {
    latest = picture;
    if (!paused) draw(picture);
  }

  // --- events

  async function read(response) {
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) if (event.startsWith("data: ")) take(JSON.parse(event.slice(6)));
    }
  }

  async function open(signal) {
    const headers = key === null ? {} : { authorization: `Bearer ${key}` };
    const response = await fetch("dashboard/events", { headers, signal, cache: "no-store" });
    if (response.status === 401) {
      askForKey(key === null ? "" : "This is not the operator's key.");
      return false;
    }
    if (!response.ok) throw new Error(`answered ${response.status}`);
    $("key-form").hidden = true;
    await read(response);
    throw new Error("the stream ended");
  }

  async function follow() {
    stream?.abort();
    const mine = (stream = new AbortController());
    for (let wait_s = 1; !mine.signal.aborted; wait_s = Math.min(MAX_RETRY_S, 2 * wait_s)) {
      const seen = document.body.dataset.pictures;
      try {
        if (!(await open(mine.signal))) return;
      } catch (problem) {
        if (mine.signal.aborted) return;
        tell("bad", `connection lost (${problem.message}); trying again`);
      }
      if (document.body.dataset.pictures !== seen) wait_s = 1;
      await new Promise((resolve) => setTimeout(resolve, wait_s * 1000));
    }
  }

  function askForKey(problem) {
    tell("bad", "waiting for the operator's key");
    $("key-problem").textContent = problem;
    $("key-form").hidden = false;
    $("key").focus();
  }

  // --- controls

  function setTheme(theme) {
    document.documentElement.dataset.theme = theme;
    $("theme").textContent = `Theme: ${theme}`;
    try {
      localStorage.setItem("conductor-theme", theme);
    } catch {
      return; // a browser that keeps nothing still switches
    }
  }

  function storedTheme() {
    try {
      return localStorage.getItem("conductor-theme");
    } catch {
      return null;
    }
  }

  function nextTheme() {
    setTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length]);
  }

  function togglePause() {
    paused = !paused;
    $("pause").setAttribute("aria-pressed", String(paused));
    $("pause").textContent = paused ? "Resume" : "Pause";
    if (!paused && latest) draw(latest);
  }

  function onKey(event) {
    if (event.target.matches("input") || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "p") togglePause();
    if (event.key === "t") nextTheme();
  }

  setTheme(THEMES.includes(storedTheme()) ? storedTheme() : "auto");
  $("theme").addEventListener("click", nextTheme);
  $("pause").addEventListener("click", togglePause);
  document.addEventListener("keydown", onKey);
  $("decision-list").addEventListener("keydown", onListKey);
  $("decision-list").addEventListener("click", (event) => {
    const item = event.target.closest("li");
    if (item) choose(item.dataset.id);
  });
  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    key = $("key").value;
    $("key").value = "";
    follow();
  });
  document.addEventListener("visibilitychange", () => (document.hidden ? stream?.abort() : follow()));
  new ResizeObserver(() => latest && drawEstimates(latest)).observe($("estimates"));
  follow();
})();
