// The charts of report.html after Bokeh has drawn them: colours of the theme, values under the cursor, toggles, reset.
// The page (page.html) holds one <figure data-chart> per Bokeh figure, with one legend button per curve.
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
    return String(Number(value.toPrecision(3)));
  };

  // Index of the step that is nearest to x; steps are ascending.
  const nearest = (steps, x) => {
    let low = 0, high = steps.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (steps[middle] < x) low = middle + 1; else high = middle;
    }
    return low > 0 && x - steps[low - 1] < steps[low] - x ? low - 1 : low;
  };

  const start = (doc) => {
    const column = (source, key) => doc.get_model_by_name(source).get_array(key);
    const curves = (button) => [button.dataset.name, `${button.dataset.name}/dots`]
      .map((name) => doc.get_model_by_name(name)).filter((curve) => curve !== null);

    // Colours live in CSS, where they follow the light and dark theme.
    const paint = () => {
      const style = getComputedStyle(document.documentElement);
      for (const button of document.querySelectorAll(".legend button")) {
        const color = style.getPropertyValue(`--s${button.dataset.slot}`).trim();
        for (const curve of curves(button)) {
          const filled = curve.glyph.type === "Quad" || curve.glyph.type === "Scatter";
          curve.glyph[filled ? "fill_color" : "line_color"] = { value: color };
        }
      }
      doc.get_model_by_name("cursor").line_color = style.getPropertyValue("--soft").trim();
    };

    // x is a step, or null for the last step of the run.
    const read = (x) => {
      for (const card of cards) {
        const steps = column(card.dataset.source, "step");
        const index = x === null ? steps.length - 1 : nearest(steps, x);
        card.querySelector(".at").textContent = steps.length ? `step ${steps[index]}` : "";
        for (const button of card.querySelectorAll(".legend button")) {
          button.querySelector("b").textContent = format(column(card.dataset.source, button.dataset.key)[index], card.dataset.form);
        }
      }
    };

    let waiting = false, wanted = null;
    const readSoon = (x) => {
      wanted = x;
      if (waiting) return;
      waiting = true;
      requestAnimationFrame(() => { waiting = false; read(wanted); });
    };

    const coarse = matchMedia("(pointer: coarse)").matches;
    for (const card of cards) {
      const figure = doc.get_model_by_name(card.dataset.chart);
      for (const name of ["mousemove", "tap"]) figure.on_event(name, (event) => readSoon(event.x));
      figure.on_event("mouseleave", () => readSoon(null));
      figure.on_event("doubletap", () => figure.reset.emit());
      // On a touch screen a drag must scroll the page.
      if (coarse) for (const tool of figure.toolbar.tools) if (tool.type === "BoxZoomTool") tool.active = false;
      for (const button of card.querySelectorAll(".legend button")) {
        button.addEventListener("click", () => {
          const shown = button.getAttribute("aria-pressed") !== "true";
          button.setAttribute("aria-pressed", String(shown));
          for (const curve of curves(button)) curve.visible = shown;
        });
      }
    }
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
    paint();
    read(null);
    document.documentElement.dataset.charts = String(cards.length);
  };

  // Bokeh builds its views after the page is loaded.
  const wait = () => {
    const doc = window.Bokeh && Bokeh.documents[0];
    if (doc && doc.is_idle) start(doc); else requestAnimationFrame(wait);
  };
  wait();
})();
