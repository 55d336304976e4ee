// Tables are sorted by a click on a heading; without this script they stay as they are.
for (const table of document.querySelectorAll("table.labkit-table")) {
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const upwards = heading.getAttribute("aria-sort") !== "ascending";
      headings.forEach((other) => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", upwards ? "ascending" : "descending");
      const key = (row) => row.cells[column].dataset.sort ?? row.cells[column].textContent.trim();
      const compare = (a, b) => (isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b);
      const missing = (row) => ["", "–"].includes(row.cells[column].textContent.trim());
      const rows = [...table.tBodies[0].rows];
      rows.sort((a, b) => missing(a) - missing(b) || (upwards ? 1 : -1) * compare(key(a), key(b)));
      table.tBodies[0].append(...rows);
    });
  });
}
// What is folded is printed, too.
addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details:not([open])")) details.dataset.printing = details.open = true;
});
addEventListener("afterprint", () => {
  for (const details of document.querySelectorAll("details[data-printing]")) {
    details.open = false;
    delete details.dataset.printing;
  }
});
