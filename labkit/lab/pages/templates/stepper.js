// Goes through recorded messages: ranks in a circle, each with its vector; arrows are the messages of a step.
for (const stepper of document.querySelectorAll(".labkit-stepper:not([data-ready])")) {
  stepper.dataset.ready = "";
  const schedules = JSON.parse(stepper.querySelector("script").textContent);
  const [algorithm, ranks] = stepper.querySelectorAll("select");
  const [back, next] = stepper.querySelectorAll("button");
  const range = stepper.querySelector("input");
  const picture = stepper.querySelector("svg");
  const status = stepper.querySelector("[role=status]");
  const make = (parent, name, attributes, text = "") => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.textContent = text;
    parent.append(element);
    return element;
  };
  const bits = (number) => number.toString(2).replaceAll("0", "").length;
  const times = (number) => String(Math.round(100 * number) / 100);

  const draw = () => {
    const p = Number(ranks.value);
    const { elements, messages, held } = schedules[algorithm.value][p];
    const step = Number(range.value);
    const now = messages.filter(([round]) => round === step);
    const [width, height] = [96, 20];
    const [across, down] = stepper.clientWidth < 520 ? [380, 440] : [640, 380];
    const place = (rank) => {
      const angle = (2 * Math.PI * rank) / p - Math.PI / 2 - (p === 2 ? Math.PI / 2 : 0);
      return [across / 2 + (across / 2 - 60) * Math.cos(angle), down / 2 + (down / 2 - 40) * Math.sin(angle)];
    };
    picture.setAttribute("viewBox", `0 0 ${across} ${down}`);
    picture.replaceChildren();
    const tip = make(make(picture, "defs", {}), "marker", { id: "labkit-tip", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 9, markerHeight: 9, markerUnits: "userSpaceOnUse", orient: "auto" });
    make(tip, "path", { d: "M0 0 L8 4 L0 8 z", class: "tip" });
    for (const [, source, target, start, stop] of now) {
      const [[x0, y0], [x1, y1]] = [place(source), place(target)];
      const length = Math.hypot(x1 - x0, y1 - y0);
      const [dx, dy] = [(x1 - x0) / length, (y1 - y0) / length];
      const clear = Math.min((width / 2 + 6) / Math.max(Math.abs(dx), 1e-9), 30 / Math.max(Math.abs(dy), 1e-9)); // of the boxes
      const [sx, sy] = [-4 * dy, 4 * dx]; // there and back, side by side
      make(picture, "line", { x1: x0 + clear * dx + sx, y1: y0 + clear * dy + sy, x2: x1 - clear * dx + sx, y2: y1 - clear * dy + sy, class: "message", "stroke-width": 1 + (3 * (stop - start)) / elements, "marker-end": "url(#labkit-tip)" });
    }
    for (let rank = 0; rank < p; rank++) {
      const [x, y] = place(rank);
      const left = x - width / 2;
      make(picture, "text", { x, y: y - 8 }, `rank ${rank}`);
      held[step][rank].forEach((who, index) => {
        const share = bits(who) / p;
        const cell = { x: left + (index * width) / elements, y, width: width / elements, height };
        make(picture, "rect", { ...cell, class: share === 1 ? "all" : "some", "fill-opacity": share === 1 ? 1 : share * 0.8 });
      });
      for (const [, , target, start, stop] of now) {
        if (target === rank) make(picture, "rect", { x: left + (start * width) / elements, y: y - 1, width: ((stop - start) * width) / elements, height: height + 2, class: "new" });
      }
      make(picture, "rect", { x: left, y, width, height, class: "frame" });
    }
    const sent = Array(p).fill(0);
    for (const [round, source, , start, stop] of messages) if (round <= step) sent[source] += (stop - start) / elements;
    const steps = held.length - 1;
    const complete = held[step].flat().filter((who) => bits(who) === p).length / (p * elements);
    const pairs = now.map(([, source, target]) => `${source}→${target}`).join(", ");
    status.textContent =
      step === 0
        ? `Before the first of ${steps} steps, every rank has its input alone.`
        : `Step ${step} of ${steps}: ${now.length} message${now.length > 1 ? "s" : ""}${now.length <= 8 ? ` (${pairs})` : ", all at once"}. ` +
          `So far each rank has sent at most ${times(Math.max(...sent))} times the tensor; ${Math.round(100 * complete)}% of the result is complete.`;
    picture.setAttribute("aria-label", `${algorithm.selectedOptions[0].text}, ${p} ranks. ${status.textContent}`);
    back.disabled = step === 0;
    next.disabled = step === steps;
  };
  const restart = () => {
    range.max = schedules[algorithm.value][ranks.value].held.length - 1;
    range.value = 0;
    draw();
  };
  algorithm.addEventListener("change", restart);
  ranks.addEventListener("change", restart);
  range.addEventListener("input", draw);
  back.addEventListener("click", () => { range.stepDown(); draw(); });
  next.addEventListener("click", () => { range.stepUp(); draw(); });
  restart();
}
