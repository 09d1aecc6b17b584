for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const up = head.ariaSort === "descending" || (!head.ariaSort && column === 0);
      const value = (row) => row.cells[column].dataset.by ?? row.cells[column].textContent;
      const rows = [...table.tBodies[0].rows].sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        const order = column === 0 || isNaN(x) || isNaN(y) ? x.localeCompare(y, undefined, { numeric: true }) : x - y;
        return up ? order : -order;
      });
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      table.tBodies[0].append(...rows);
    });
  });
}
