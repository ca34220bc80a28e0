// The charts of a page after Bokeh has drawn them: colours of the theme, values under the cursor, toggles, reset.
// A page (parts.html) holds one <figure data-chart> per Bokeh figure, with one legend button per series.
(() => {
  "use strict";
  const cards = [...document.querySelectorAll("figure[data-chart]")];
  if (!cards.length) return;

  const format = (value, form) => {
    if (!Number.isFinite(value)) return "-";
    if (form === "percent") {
      const edge = Math.min(Math.abs(value), Math.abs(1 - value));
      return `${(100 * value).toFixed(edge > 0 && edge < 0.001 ? 4 : 1)} %`;
    }
    if (form === "exponent") return value.toExponential(2);
    if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en");
    if (value !== 0 && Math.abs(value) < 1e-4) return value.toExponential(1);
    return String(Number(value.toPrecision(3)));
  };

  // Index of the place that is nearest to x; places are ascending.
  const nearest = (places, x) => {
    let low = 0, high = places.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (places[middle] < x) low = middle + 1; else high = middle;
    }
    return low > 0 && x - places[low - 1] < places[low] - x ? low - 1 : low;
  };

  performance.mark("page parsed");
  const start = (doc) => {
    performance.mark("figures made");
    const model = (name) => doc.get_model_by_name(name);
    const column = (table, key) => model(table).get_array(key);
    const buttonsOf = (card) => [...card.querySelectorAll(".legend button")];
    const all = cards.flatMap(buttonsOf);
    const glyphs = (button) => ["", "/dots", "/spread"].map((part) => model(button.dataset.name + part)).filter((found) => found !== null);

    // Colours live in CSS, where they follow the light and dark theme.
    const paint = () => {
      const style = getComputedStyle(document.documentElement);
      const color = (name) => style.getPropertyValue(`--${name}`).trim();
      const ramp = Array.from({ length: 8 }, (_, index) => color(`ramp${index}`));
      for (const button of all) {
        const colours = model(`${button.dataset.name}/colours`);
        if (colours !== null) colours.palette = ramp;
        else for (const { glyph } of glyphs(button)) {
          glyph[glyph.type === "Line" ? "line_color" : "fill_color"] = { value: color(`s${button.dataset.slot}`) };
        }
        const diagonal = model(`${button.dataset.name}/diagonal`);
        if (diagonal !== null) diagonal.line_color = color("soft");
      }
      const cursor = model("cursor");
      if (cursor !== null) cursor.line_color = color("soft");
    };

    const say = (card, text) => { card.querySelector(".at").textContent = text; };
    const value = (button, index) => {
      const values = column(button.dataset.table, button.dataset.key);
      button.querySelector("b").textContent = index === null ? "" : format(values[index], button.closest("figure").dataset.form);
    };
    const label = (table, index, x) => {
      const labels = model(table).get_column("label");
      return labels ? labels[index] : `${x} ${format(column(table, x)[index], "number")}`;
    };

    // The values of curves, layers and bars at x; null is the last step, and nothing on an axis of its own.
    const readAlong = (card, x) => {
      const axis = card.dataset.x;
      let said = "", distance = Infinity;
      for (const button of buttonsOf(card)) {
        const places = column(button.dataset.table, axis);
        if (!places.length || (x === null && !("shared" in card.dataset))) { value(button, null); continue; }
        const index = x === null ? places.length - 1 : nearest(places, x);
        const off = x === null ? -places[index] : Math.abs(places[index] - x);
        if (off < distance) { distance = off; said = label(button.dataset.table, index, axis); }
        value(button, index);
      }
      say(card, said);
    };

    const readCell = (card, x, y) => {
      let said = "";
      for (const button of buttonsOf(card)) {
        const [left, right, bottom, top] = ["left", "right", "bottom", "top"].map((key) => column(button.dataset.table, key));
        const index = x === null ? -1 : left.findIndex((at, i) => at <= x && x < right[i] && bottom[i] <= y && y < top[i]);
        if (index < 0) continue;
        const count = column(button.dataset.table, button.dataset.key)[index];
        const between = (low, high) => `${low.toFixed(2)} to ${high.toFixed(2)}`;
        said = `rollout ${between(left[index], right[index])}, trainer ${between(bottom[index], top[index])}: ${format(count, "number")} tokens`;
      }
      say(card, said);
    };

    const read = (card, at) => {
      if (card.dataset.kind === "cells") readCell(card, at && at.x, at && at.y);
      else readAlong(card, at && at.x);
    };
    const together = cards.filter((card) => "shared" in card.dataset);

    // By card: a move onto one chart must not lose that the cursor has left another in the same frame.
    const wanted = new Map();
    const readSoon = (card, at) => {
      if (!wanted.size) requestAnimationFrame(() => {
        for (const [one, place] of wanted) read(one, place);
        wanted.clear();
      });
      for (const one of together.includes(card) ? together : [card]) wanted.set(one, at);
    };

    const toggle = (button, shown) => {
      button.setAttribute("aria-pressed", String(shown));
      for (const glyph of glyphs(button)) glyph.visible = shown;
    };
    const isShown = (button) => button.getAttribute("aria-pressed") === "true";

    // Made when a chart is saved: the legends of all charts would be a quarter of what it takes to draw the page.
    const legendOf = async (card) => {
      const name = `${card.dataset.chart}/legend`, { Legend, LegendItem } = Bokeh.Models;
      if (model(name) !== null) return model(name);
      const said = (button) => [...button.childNodes].filter((node) => node.nodeType === Node.TEXT_NODE).map((node) => node.data).join("").trim();
      const items = buttonsOf(card).map((button) => new LegendItem({ label: { value: said(button) }, renderers: glyphs(button).slice(0, 1) }));
      const legend = new Legend({ name, items, location: "top_left", background_fill_alpha: 0.6 });
      model(card.dataset.chart).add_layout(legend);
      while (Bokeh.index.find_one(legend) === null) await new Promise((made) => setTimeout(made, 20));
      return legend;
    };
    // The chart as a file, with the title and the legend that the page shows beside it.
    const save = async (card) => {
      const id = card.dataset.chart, view = Bokeh.index.find_one(model(id));
      const shown = [model(id).title, ...(card.dataset.kind === "cells" ? [] : [await legendOf(card)])];
      for (const one of shown) one.visible = true;
      view.invalidate_layout();
      await new Promise((drawn) => setTimeout(drawn, 200));
      const link = document.createElement("a");
      link.href = URL.createObjectURL(await view.export("svg").to_blob());
      link.download = `${id}.svg`;
      for (const one of shown) one.visible = false;
      view.invalidate_layout();
      link.click();
    };

    const coarse = matchMedia("(pointer: coarse)").matches;
    for (const card of cards) {
      const figure = model(card.dataset.chart);
      for (const name of ["mousemove", "tap"]) figure.on_event(name, (event) => readSoon(card, { x: event.x, y: event.y }));
      figure.on_event("mouseleave", () => readSoon(card, null));
      card.querySelector(".save").addEventListener("click", () => save(card));
      figure.on_event("doubletap", () => figure.reset.emit());
      // On a touch screen a drag must scroll the page.
      if (coarse) for (const tool of figure.toolbar.tools) if (tool.type === "BoxZoomTool") tool.active = false;
      for (const button of buttonsOf(card)) button.addEventListener("click", () => toggle(button, !isShown(button)));
    }
    for (const main of document.querySelectorAll("[data-toggle-run]")) {
      main.addEventListener("click", () => {
        const shown = !isShown(main);
        main.setAttribute("aria-pressed", String(shown));
        for (const button of all) if (button.dataset.run === main.dataset.toggleRun) toggle(button, shown);
      });
    }
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
    paint();
    for (const card of cards) read(card, null);
    performance.mark("charts drawn");
    document.documentElement.dataset.charts = String(cards.length);
  };

  // Bokeh builds its views after the page is loaded.
  const wait = () => {
    const doc = window.Bokeh && Bokeh.documents[0];
    if (doc && doc.is_idle) start(doc); else requestAnimationFrame(wait);
  };
  wait();
})();
