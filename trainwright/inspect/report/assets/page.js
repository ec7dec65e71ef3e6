"use strict";
const COLOURS = ["#2f6fed", "#e8710a", "#12926f", "#b5179e", "#d03a3a", "#7a5cd6", "#8a7a00", "#0f8fa8", "#6b7787", "#c2577e"];
const PHASE_COLOURS = { data: "#e8a20a", forward: "#2f6fed", backward: "#12926f", optimizer: "#7a5cd6", waiting: "#a8446c",
  metrics: "#0f8fa8", compile: "#c2577e", evaluation: "#e8710a", save: "#d03a3a", imports: "#8a7a00", hooks: "#6b7787", other: "#b4bcc8" };
const byId = (id) => document.getElementById(id);
const hidden = new Set(), root = document.documentElement, isNarrow = () => innerWidth < 640;
const colour = (run) => COLOURS[run % COLOURS.length];
const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();
const options = { displayModeBar: false, responsive: true }; // dragging zooms, a double click resets

root.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";

function smooth(line, share) { // the mean over a share of the x range, from the means of equal ranges
  const x = line.mx || line.x, y = line.my || line.y, c = line.mc || x.map(() => 1), n = x.length;
  const half = share * (x[n - 1] - x[0]) / 2, out = new Array(n);
  let first = 0, end = 0, sum = 0, count = 0;
  for (let i = 0; i < n; i++) {
    while (end < n && x[end] <= x[i] + half) { sum += y[end] * c[end]; count += c[end++]; }
    while (x[first] < x[i] - half) { sum -= y[first] * c[first]; count -= c[first++]; }
    out[i] = sum / count;
  }
  return { x, y: out };
}

function tracesOf(chart) {
  const share = byId("smooth").value / 100, single = CONTENT.runs.length === 1, traces = [];
  for (const line of chart.lines) {
    if (hidden.has(line.run) || !line.x.length) continue;
    const k = byId("x").value === "samples" ? CONTENT.samples[line.run] || 1 : 1;
    const scaled = (xs) => (k === 1 ? xs : xs.map((x) => x * k));
    const shade = single && line.eval ? COLOURS[1] : colour(line.run);
    const name = (single ? "" : CONTENT.runs[line.run] + " ") + (line.eval ? "evaluation" : chart.lines.some((l) => l.eval) ? "training" : single ? chart.title : "");
    const isNoisy = !line.eval && line.x.length > 30 && share > 0 && chart.key !== "lr";
    if (isNoisy) {
      traces.push({ x: scaled(line.x), y: line.y, mode: "lines", line: { color: shade, width: 1 }, opacity: 0.25, hoverinfo: "skip" });
      const s = smooth(line, share);
      traces.push({ x: scaled(s.x), y: s.y, mode: "lines", line: { color: shade, width: 2 }, name });
    } else {
      const few = line.x.length <= 60;
      traces.push({ x: scaled(line.x), y: line.y, mode: few && chart.key !== "lr" ? "lines+markers" : "lines", name,
        line: { color: shade, width: line.x.length > 500 ? 1.2 : 2, dash: line.eval && !single ? "dot" : "solid" }, marker: { size: line.x.length > 25 ? 4 : 6, color: shade } });
    }
  }
  return traces;
}

function layoutOf(chart) {
  const grid = css("--line"), isLog = byId("log").checked && chart.lines.every((l) => l.y.every((y) => y > 0));
  const axis = { gridcolor: grid, linecolor: grid, zerolinecolor: grid, automargin: true, tickfont: { size: 11 } };
  const fromZero = ["throughput", "data_time"].includes(chart.key) && !isLog;
  const isLarge = chart.lines.some((l) => l.y.some((y) => Math.abs(y) >= 1000));
  return {
    margin: { l: 46, r: 10, t: 10, b: 34 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false,
    font: { color: css("--soft"), family: getComputedStyle(document.body).fontFamily, size: 12 }, hovermode: "x unified",
    hoverlabel: { bgcolor: css("--card"), bordercolor: grid, font: { color: css("--text"), size: 12 } }, uirevision: chart.key + isLog + byId("x").value,
    xaxis: { ...axis, exponentformat: "SI", title: { text: byId("x").value, font: { size: 11 }, standoff: 6 }, showgrid: false, rangemode: "tozero", zeroline: false },
    yaxis: { ...axis, type: isLog ? "log" : "linear", exponentformat: isLarge ? "SI" : "power", hoverformat: ".4~g", ticksuffix: chart.unit === "%" ? " %" : "", rangemode: fromZero ? "tozero" : "normal" },
  };
}

function drawCharts() {
  const area = byId("charts"), seen = new Set();
  CONTENT.charts.forEach((chart, place) => {
    const id = "chart-" + chart.key;
    seen.add(id);
    let card = byId(id);
    if (!card) {
      card = document.createElement("section");
      card.className = place === 0 ? "card first" : "card";
      card.id = id;
      card.innerHTML = '<h2></h2><div class="plot"></div>';
      area.append(card);
    }
    const head = card.firstChild, bad = chart.lines.reduce((sum, line) => sum + line.bad, 0);
    head.textContent = chart.title;
    const add = (text, name = "") => { const part = document.createElement("span"); part.textContent = text; part.className = name; head.append(part); return part; };
    if (chart.unit) add(chart.unit);
    if (bad) add(bad + " values are not finite");
    const kinds = new Set(chart.lines.map((line) => line.eval)), single = CONTENT.runs.length === 1;
    if (kinds.size === 2) {
      const key = add("", "key");
      for (const isEval of [false, true]) {
        const entry = document.createElement("span"), mark = document.createElement("i");
        mark.style.color = single ? COLOURS[+isEval] : css("--soft");
        if (isEval && !single) mark.className = "points";
        entry.append(mark, isEval ? "evaluation" : "training");
        key.append(entry);
      }
    }
    Plotly.react(card.lastChild, tracesOf(chart), layoutOf(chart), options);
  });
  for (const card of [...area.children]) if (!seen.has(card.id)) card.remove();
}

function drawPhases() {
  const runs = CONTENT.runs.map((_, run) => run).filter((run) => Object.keys(CONTENT.phases[run]).length);
  byId("time").hidden = !runs.length;
  if (!runs.length) return;
  const totals = runs.map((run) => Object.values(CONTENT.phases[run]).reduce((a, b) => a + b, 0));
  const single = runs.length === 1, names = Object.keys(PHASE_COLOURS).filter((name) => runs.some((run) => CONTENT.phases[run][name]));
  const traces = names.map((name) => ({
    type: "bar", orientation: "h", name, y: runs.map((run) => CONTENT.runs[run]), x: runs.map((run) => CONTENT.phases[run][name] || 0),
    marker: { color: PHASE_COLOURS[name] }, textposition: "inside", insidetextanchor: "middle", textangle: 0, constraintext: "none",
    text: runs.map((run, i) => ((CONTENT.phases[run][name] || 0) / totals[i] > (isNarrow() ? 0.14 : 0.06) ? Math.round((100 * CONTENT.phases[run][name]) / totals[i]) + " %" : "")),
    textfont: { color: "#fff" }, hovertemplate: name + ": %{x:.3~g} s<extra></extra>",
  }));
  const base = layoutOf({ key: "phases", lines: [] });
  Plotly.react(byId("phases"), traces, { ...base, barmode: "stack", hovermode: "closest", height: 96 + 34 * runs.length + (isNarrow() ? 40 : 0), showlegend: true,
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", traceorder: "normal" }, margin: { l: 10, r: 10, t: 30, b: 34 }, bargap: 0.3,
    xaxis: { ...base.xaxis, type: "linear", title: { text: "seconds", font: { size: 11 } } }, yaxis: { ...base.yaxis, type: "category", autorange: "reversed", showticklabels: !single },
  }, options);
}

function drawRuns() {
  const area = byId("runs");
  area.replaceChildren();
  if (CONTENT.runs.length > 1) CONTENT.runs.forEach((name, run) => {
    const button = document.createElement("button"), dot = document.createElement("span");
    dot.className = "dot";
    dot.dataset.run = run;
    button.append(dot, name);
    button.title = "Show or hide";
    button.className = hidden.has(run) ? "off" : "";
    button.setAttribute("aria-pressed", String(!hidden.has(run)));
    button.onclick = () => { hidden.has(run) ? hidden.delete(run) : hidden.add(run); drawRuns(); drawCharts(); };
    area.append(button);
  });
  for (const dot of document.querySelectorAll(".dot")) dot.style.background = colour(+dot.dataset.run);
}

function drawTables() {
  byId("overview").innerHTML = CONTENT.overview; // the text in it is escaped where it is written
  const open = [...document.querySelectorAll("#details details")].map((one) => one.open);
  byId("details").innerHTML = CONTENT.details;
  document.querySelectorAll("#details details").forEach((one, i) => { one.open = Boolean(open[i]); });
}

function draw() { drawTables(); drawRuns(); drawCharts(); drawPhases(); }

byId("smooth").oninput = () => { byId("smoothed").textContent = byId("smooth").value + " %"; drawCharts(); };
byId("log").onchange = byId("x").onchange = drawCharts;
byId("axis").hidden = !CONTENT.samples.every(Boolean);
byId("theme").onclick = () => { root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark"; drawCharts(); drawPhases(); };
draw();
root.dataset.drawn = String(Math.round(performance.now())); // milliseconds until everything is drawn

if (LIVE) {
  const live = byId("live");
  live.hidden = false;
  let tag = "";
  const poll = async () => {
    try {
      const answer = await fetch("content.json", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
      if (answer.status === 200) { tag = answer.headers.get("ETag") || ""; CONTENT = await answer.json(); draw(); }
      live.textContent = "live"; live.className = "";
    } catch { live.textContent = "not connected"; live.className = "off"; }
    setTimeout(poll, 2000);
  };
  setTimeout(poll, 2000);
}
