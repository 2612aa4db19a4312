"use strict";
// Draws the plots when they come near the window, in the colours of the page; legends are buttons.
// Arrays are stored once: {"array": k} stands for the k-th of them.
const stored = JSON.parse(document.getElementById("plots").textContent);
const plots = restored(stored.plots);
const boxes = [...document.querySelectorAll("[data-plot]")];
const dark = matchMedia("(prefers-color-scheme: dark)");
const touch = matchMedia("(pointer: coarse)");
const drawn = new Set();

function restored(value) {
  if (Array.isArray(value)) return value.map(restored);
  if (value === null || typeof value !== "object") return value;
  if (Number.isInteger(value.array)) return stored.arrays[value.array];
  return Object.fromEntries(Object.entries(value).map(([key, v]) => [key, restored(v)]));
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function dressed(plot) {
  const axis = { gridcolor: colour("--grid"), linecolor: colour("--line"), zeroline: false,
    automargin: true, exponentformat: "power", nticks: 6 };
  const layout = { ...plot.layout, autosize: true, showlegend: false, uirevision: "kept",
    font: { color: colour("--text"), size: 12, family: getComputedStyle(document.body).fontFamily },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 8, r: 10, t: 8, b: 8 }, hovermode: plot.layout.hovermode || "closest",
    hoverlabel: { namelength: -1 },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--soft"), activecolor: colour("--text") },
    dragmode: touch.matches ? false : "zoom" }; // a finger that scrolls the page must not zoom
  for (const name of ["xaxis", "yaxis"]) layout[name] = { ...axis, ...plot.layout[name] };
  if (plot.data[0] && plot.data[0].type === "heatmap") {
    for (const name of ["xaxis", "yaxis"]) delete layout[name].nticks;
    const ends = [[0, colour("--low")], [0.5, colour("--back")], [1, colour("--high")]];
    plot.data[0].colorscale = ends;
    plot.data[0].textfont = { color: colour("--text") };
  }
  return layout;
}

function draw(box) {
  const plot = plots[box.dataset.plot];
  drawn.add(box);
  return Plotly.react(box, plot.data, dressed(plot), { responsive: true, displaylogo: false,
    displayModeBar: touch.matches ? false : "hover",
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
    toImageButtonOptions: { format: "svg", filename: "flatlens" } });
}

function show(group, shown) {
  for (const button of document.querySelectorAll("button[data-series]")) {
    if (button.dataset.group === group) {
      button.setAttribute("aria-pressed", String(shown(button.dataset.series)));
    }
  }
  for (const box of boxes.filter((b) => b.dataset.group === group)) {
    const { data } = plots[box.dataset.plot];
    plots[box.dataset.plot].data = data.map((trace) =>
      trace.legendgroup ? { ...trace, visible: shown(trace.legendgroup) } : trace);
    if (drawn.has(box)) draw(box);
  }
}

function pressed(group) {
  const buttons = [...document.querySelectorAll('button[aria-pressed="true"]')];
  return buttons.filter((b) => b.dataset.group === group).map((b) => b.dataset.series);
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-group]");
  if (!button) return;
  const { group, series, only } = button.dataset;
  if (button.dataset.all !== undefined) return show(group, () => true);
  const now = new Set(only ? JSON.parse(only) : pressed(group));
  if (series !== undefined && !now.delete(series)) now.add(series);
  show(group, (name) => now.has(name));
});

document.addEventListener("change", (event) => {
  const { axis, of } = event.target.dataset;
  if (!axis) return;
  const plot = plots[of], choice = event.target;
  plot.data = plot.data.map((trace, k) => ({ ...trace, [axis]: plot.columns[choice.value][k] }));
  const title = { text: choice.selectedOptions[0].textContent };
  plot.layout[`${axis}axis`] = { ...plot.layout[`${axis}axis`], title };
  plot.layout.uirevision = choice.value;
  for (const box of boxes.filter((b) => b.dataset.plot === of)) draw(box);
});

const near = new IntersectionObserver((seen) => {
  for (const { target, isIntersecting } of seen) {
    if (isIntersecting && !drawn.has(target)) draw(target);
  }
}, { rootMargin: "400px" });
boxes.forEach((box) => near.observe(box));
dark.addEventListener("change", () => drawn.forEach(draw));
addEventListener("beforeprint", () => boxes.forEach(draw));
