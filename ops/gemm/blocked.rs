//! Large products: both operands are packed, then tiles of C are computed from the packed slivers.
//!
//! A chunk is at most [`DEPTH`] terms of k and as many rows and columns as fit in [`PACKED`] elements. Its slivers are
//! packed in parallel, then its C is cut into tiles (by shape alone) which run in parallel and share the slivers.

use crate::simd::{Kernel, Lanes, Real};

use super::pack::{self, with_scratch};
use super::tile::{Target, tile, with_tile};
use super::{KC, Product, for_pieces};

/// Terms of k per chunk.
const DEPTH: usize = 8 * KC;
/// Packed elements of A, and of B, per chunk.
const PACKED: usize = 2 << 20;
/// Bytes of A that a tile of C works on per KC terms: a share of the second cache level.
const A_BYTES: usize = 150 << 10;
/// Tiles per chunk that are wanted at least, for the threads to share.
const TILES: usize = 16;
/// Columns of a tile at least: fewer would reread A too often.
const MIN_COLUMNS: usize = 128;

/// Rows and columns of the register tile.
struct TileSize;

impl<E: Real> Kernel<E> for TileSize {
    type Output = (usize, usize);

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(self) -> (usize, usize) {
        fn size<E: Real, L: Lanes<Elem = E>, const H: usize, const V: usize>() -> (usize, usize) {
            (H, V * L::N)
        }
        with_tile!(L, size())
    }
}

/// One chunk and its packed slivers. A's block of KC terms number q begins at `q * KC * a_rows`, its panel number i at
/// `i * height * depth` therein; B alike.
#[derive(Clone, Copy)]
struct Chunk<E> {
    product: Product<E>,
    height: usize,
    width: usize,
    a_rows: usize,
    b_cols: usize,
    a: *mut E,
    b: *mut E,
}

// SAFETY: as for Product; slivers are written by one thread each, and read only after all are written.
unsafe impl<E: Real> Send for Chunk<E> {}
// SAFETY: as above.
unsafe impl<E: Real> Sync for Chunk<E> {}

pub(super) fn run<E: Real>(product: Product<E>, parallel: bool) {
    let Product { m, n, k, .. } = product;
    // SAFETY: the level is one that level() returned.
    let (height, width) = unsafe { E::dispatch_at(product.level, TileSize) };
    let depth = DEPTH.min(k);
    let rows = (PACKED / depth).min(m).next_multiple_of(height);
    let cols = (PACKED / depth).min(n).next_multiple_of(width);
    with_scratch((rows + cols) * depth, |room: *mut E| {
        for p in (0..k).step_by(DEPTH) {
            for j in (0..n).step_by(cols) {
                for i in (0..m).step_by(rows) {
                    let (m, n) = (rows.min(m - i), cols.min(n - j));
                    // SAFETY: (i, p), (p, j) and (i, j) are elements of A, B and C; the room is (rows + cols) * depth.
                    let chunk = unsafe {
                        Chunk {
                            product: Product {
                                m,
                                n,
                                k: DEPTH.min(k - p),
                                a: product.a.add(i * product.a_rs + p * product.a_cs),
                                b: product.b.add(p * product.b_rs + j * product.b_cs),
                                c: product.c.add(i * product.c_rs + j * product.c_cs),
                                beta: if p == 0 { product.beta } else { E::ONE },
                                ..product
                            },
                            height,
                            width,
                            a_rows: m.next_multiple_of(height),
                            b_cols: n.next_multiple_of(width),
                            a: room,
                            b: room.add(rows * depth),
                        }
                    };
                    chunk.run(i == 0, parallel);
                }
            }
        }
    });
}

impl<E: Real> Chunk<E> {
    fn run(self, pack_b: bool, parallel: bool) {
        let Product { m, n, k, level, .. } = self.product;
        let (a_panels, b_slivers) = (self.a_rows / self.height, if pack_b { self.b_cols / self.width } else { 0 });
        for_pieces(a_panels + b_slivers, 1, self.width * k, parallel, |index, _| {
            // SAFETY: each index writes one panel or sliver; the level is one that level() returned.
            unsafe {
                if index < b_slivers {
                    E::dispatch_at(level, PackB(self, index));
                } else {
                    E::dispatch_at(level, PackA(self, index - b_slivers));
                }
            }
        });

        let most = (A_BYTES / (KC * size_of::<E>())).max(self.height);
        let row_tiles = m.div_ceil(most);
        let rows = m.div_ceil(row_tiles).next_multiple_of(self.height);
        let row_tiles = m.div_ceil(rows);
        let col_tiles = TILES.div_ceil(row_tiles).min(n.div_ceil(MIN_COLUMNS));
        let cols = n.div_ceil(col_tiles).next_multiple_of(self.width);
        let col_tiles = n.div_ceil(cols);
        let cost = rows * cols * k / 16;
        for_pieces(row_tiles * col_tiles, 1, cost, parallel, |index, _| {
            let (i, j) = (index / col_tiles * rows, index % col_tiles * cols);
            let tile = Tile { chunk: self, rows: (i, m.min(i + rows)), cols: (j, n.min(j + cols)) };
            // SAFETY: tiles are disjoint; the level is one that level() returned.
            unsafe { E::dispatch_at(level, tile) };
        });
    }
}

/// Packs one panel of A, a register tile high.
struct PackA<E>(Chunk<E>, usize);

impl<E: Real> Kernel<E> for PackA<E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(self) {
        let PackA(Chunk { product, height, a_rows, a, .. }, index) = self;
        let row = index * height;
        for p in (0..product.k).step_by(KC) {
            let depth = KC.min(product.k - p);
            // SAFETY: rows from `row` and columns from `p` are inside A; the panel is inside the packed block.
            unsafe {
                let from = (product.a.add(row * product.a_rs + p * product.a_cs), product.a_cs, product.a_rs);
                let to = a.add(p * a_rows + row * depth);
                pack::sliver::<E, L>(to, height, from, depth, height.min(product.m - row));
            }
        }
    }
}

/// Packs one sliver of B, a register tile wide.
struct PackB<E>(Chunk<E>, usize);

impl<E: Real> Kernel<E> for PackB<E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(self) {
        let PackB(Chunk { product, width, b_cols, b, .. }, index) = self;
        let col = index * width;
        for p in (0..product.k).step_by(KC) {
            let depth = KC.min(product.k - p);
            // SAFETY: rows from `p` and columns from `col` are inside B; the sliver is inside the packed block.
            unsafe {
                let from = (product.b.add(p * product.b_rs + col * product.b_cs), product.b_rs, product.b_cs);
                let to = b.add(p * b_cols + col * depth);
                pack::sliver::<E, L>(to, width, from, depth, width.min(product.n - col));
            }
        }
    }
}

/// Rows and columns (from, to) of a chunk's C, cut at register tiles.
struct Tile<E> {
    chunk: Chunk<E>,
    rows: (usize, usize),
    cols: (usize, usize),
}

impl<E: Real> Kernel<E> for Tile<E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(self) {
        // SAFETY: the chunk's slivers are packed, for this level.
        unsafe { with_tile!(L, compute(self)) }
    }
}

/// # Safety
/// The slivers of A and B are packed with `H` rows and `V` vectors.
#[inline(always)]
unsafe fn compute<E: Real, L: Lanes<Elem = E>, const H: usize, const V: usize>(work: Tile<E>) {
    let Tile { chunk: Chunk { product, a_rows, b_cols, a, b, .. }, rows, cols } = work;
    let width = V * L::N;
    let mut offsets = [0; H];
    for (i, offset) in offsets.iter_mut().enumerate() {
        *offset = i;
    }
    for p in (0..product.k).step_by(KC) {
        let depth = KC.min(product.k - p);
        let beta = if p == 0 { product.beta } else { E::ONE };
        for j in (cols.0..cols.1).step_by(width) {
            for i in (rows.0..rows.1).step_by(H) {
                // SAFETY: panels and slivers are padded to H rows and `width` columns; C is written inside its extents.
                unsafe {
                    let a = a.add(p * a_rows + i * depth).cast_const();
                    let b = b.add(p * b_cols + j * depth).cast_const();
                    let target = Target {
                        c: product.c.add(i * product.c_rs + j * product.c_cs),
                        c_rs: product.c_rs,
                        c_cs: product.c_cs,
                        rows: H.min(rows.1 - i),
                        cols: width.min(cols.1 - j),
                        alpha: product.alpha,
                        beta,
                    };
                    tile::<E, L, H, V, false>(depth, (a, offsets, H), (b, width), target);
                }
            }
        }
    }
}
