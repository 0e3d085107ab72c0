// The arithmetic of a plan, as hypergrid/layout.py and hypergrid/plan.py define it.
"use strict";

class Layout {
  constructor({ dims, sizes, offset = 0 }) {
    Object.assign(this, { dims, sizes, offset, size: 1, strides: [] });
    for (const size of sizes) {
      this.strides.push(this.size);
      this.size *= size;
    }
  }

  has(rank) {
    return rank >= this.offset && rank < this.offset + this.size;
  }

  // The dims that part ranks at all.
  get wide() {
    return this.dims.filter((_, axis) => this.sizes[axis] > 1);
  }

  axes(dims) {
    return this.dims.map((_, axis) => axis).filter((axis) => dims.includes(this.dims[axis]));
  }

  others(dims) {
    return this.dims.map((_, axis) => axis).filter((axis) => !dims.includes(this.dims[axis]));
  }

  sizeOf(dims) {
    return this.axes(dims).reduce((product, axis) => product * this.sizes[axis], 1);
  }

  at(rank, axis) {
    return Math.floor((rank - this.offset) / this.strides[axis]) % this.sizes[axis];
  }

  coordinate(rank) {
    return this.dims.map((dim, axis) => [dim, this.at(rank, axis)]);
  }

  group(rank, dims) {
    const axes = this.axes(dims);
    let members = [axes.reduce((r, axis) => r - this.at(rank, axis) * this.strides[axis], rank)];
    for (const axis of axes) {
      const wider = [];
      for (let k = 0; k < this.sizes[axis]; k++) {
        for (const member of members) wider.push(member + k * this.strides[axis]);
      }
      members = wider;
    }
    return members;
  }

  // The number of the rank's group over dims, in Megatron's order.
  number(rank, dims) {
    let number = 0;
    let stride = 1;
    for (const axis of this.others(dims)) {
      number += this.at(rank, axis) * stride;
      stride *= this.sizes[axis];
    }
    return number;
  }

  // The lowest rank of the group of that number.
  lowest(number, dims) {
    let rank = this.offset;
    for (const axis of this.others(dims)) {
      rank += (number % this.sizes[axis]) * this.strides[axis];
      number = Math.floor(number / this.sizes[axis]);
    }
    return rank;
  }
}

// One name's groups, as a rule; number() and nth() count them in the order of GroupPlan.all.
class Row {
  constructor(layouts, row) {
    const { label = "", layout = "", dims = [], chunk = null, pick = "all" } = row;
    const { explicit = null, backend = null } = row;
    Object.assign(this, { label, dims, chunk, pick, explicit, backend, layoutName: layout });
    this.layout = layouts.get(layout);
    this.full = explicit ? 0 : this.layout.sizeOf(dims);
    this.parts = chunk ? Math.ceil(this.full / chunk) : 1;
  }

  get count() {
    if (this.explicit) return this.explicit.length;
    return (this.layout.size / this.full) * this.parts;
  }

  nth(number) {
    if (this.explicit) return this.explicit[number];
    const first = this.layout.lowest(Math.floor(number / this.parts), this.dims);
    return this.cut(this.layout.group(first, this.dims), number % this.parts);
  }

  cut(members, part) {
    if (this.chunk) members = members.slice(part * this.chunk, (part + 1) * this.chunk);
    if (this.pick === "first") return members.slice(0, 1);
    if (this.pick === "ends" && members.length > 1) return [members[0], members.at(-1)];
    return members;
  }

  // The groups that the rank belongs to: [{row, number, members}].
  mine(rank) {
    if (this.explicit) {
      return this.explicit
        .map((members, number) => ({ row: this, number, members }))
        .filter(({ members }) => members.includes(rank));
    }
    if (!this.layout.has(rank)) return [];
    const whole = this.layout.group(rank, this.dims);
    const part = this.chunk ? Math.floor(whole.indexOf(rank) / this.chunk) : 0;
    const members = this.cut(whole, part);
    if (!members.includes(rank)) return [];
    const number = this.layout.number(rank, this.dims) * this.parts + part;
    return [{ row: this, number, members }];
  }

  get words() {
    const wide = this.dims.filter((dim) => this.layout?.sizeOf([dim]) > 1).join("-");
    const alone = this.dims.length ? `${this.dims.join("-")} of size 1` : "each rank alone";
    const dims = this.explicit ? "listed rank by rank" : wide || alone;
    const cut = this.chunk ? `, runs of ${this.chunk}` : "";
    const picked = { all: "", ends: ", first and last", first: ", the first" }[this.pick];
    return dims + cut + picked;
  }
}

// Neighbours around the ring; two members have one link, one has none.
function ring(members) {
  if (members.length < 2) return [];
  const links = members.map((member, i) => [member, members[(i + 1) % members.length]]);
  return members.length === 2 ? links.slice(0, 1) : links;
}
