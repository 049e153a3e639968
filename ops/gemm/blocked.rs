//! Large products: B is packed once, in parallel; then tiles of C, cut by shape alone, run in parallel, and each packs
//! the rows of A that it needs, block by block, so that they never leave its core's cache.

use crate::simd::{Kernel, Lanes, Real};

use super::pack::{self, Room, with_scratch};
use super::tile::{Target, tile, with_tile};
use super::{KC, Product, for_pieces};

/// Terms of k per chunk.
const DEPTH: usize = 8 * KC;
/// Packed elements of B per chunk.
const PACKED: usize = 2 << 20;
/// Rows of a tile at most: KC terms of them are a share of the second cache level.
const ROWS: usize = 96;
/// Tiles per chunk that are wanted at least, for the threads to share.
const TILES: usize = 16;
/// Columns of a tile at least: for fewer, packing A costs too much.
const MIN_COLUMNS: usize = 256;
/// Slivers of B that are packed together.
const SLIVERS: usize = 4;

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

/// Some columns of B and terms of k, for all rows. B's block of KC terms number q begins at `q * KC * b_cols`, its
/// sliver number j at `j * width * depth` therein.
#[derive(Clone, Copy)]
struct Chunk<E> {
    product: Product<E>,
    height: usize,
    width: usize,
    b_cols: usize,
    b: *mut E,
}

// SAFETY: as for Product; slivers are written by one thread each, and read only after all are written.
unsafe impl<E: Real> Send for Chunk<E> {}
// SAFETY: as above.
unsafe impl<E: Real> Sync for Chunk<E> {}

pub(super) fn run<E: Real>(product: Product<E>, parallel: bool) {
    let Product { n, k, .. } = product;
    // SAFETY: the level is one that level() returned.
    let (height, width) = unsafe { E::dispatch_at(product.level, TileSize) };
    let depth = DEPTH.min(k);
    let cols = (PACKED / depth).min(n).next_multiple_of(width);
    with_scratch(Room::Outer, cols * depth, |b: *mut E| {
        for j in (0..n).step_by(cols) {
            for p in (0..k).step_by(DEPTH) {
                // SAFETY: (0, p), (p, j) and (0, j) are elements of A, B and C.
                let part = unsafe {
                    Product {
                        n: cols.min(n - j),
                        k: DEPTH.min(k - p),
                        a: product.a.add(p * product.a_cs),
                        b: product.b.add(p * product.b_rs + j * product.b_cs),
                        c: product.c.add(j * product.c_cs),
                        beta: if p == 0 { product.beta } else { E::ONE },
                        ..product
                    }
                };
                let b_cols = part.n.next_multiple_of(width);
                Chunk { product: part, height, width, b_cols, b }.run(parallel);
            }
        }
    });
}

impl<E: Real> Chunk<E> {
    fn run(self, parallel: bool) {
        let Product { m, n, k, level, .. } = self.product;
        let piece = SLIVERS * self.width;
        for_pieces(n, piece, piece * k, parallel, |from, to| {
            // SAFETY: each piece writes its own slivers; the level is one that level() returned.
            unsafe { E::dispatch_at(level, PackB { chunk: self, from, to }) };
        });

        let rows = m.div_ceil(m.div_ceil(ROWS)).next_multiple_of(self.height);
        let row_tiles = m.div_ceil(rows);
        let col_tiles = TILES.div_ceil(row_tiles).min(n.div_ceil(MIN_COLUMNS));
        let cols = n.div_ceil(col_tiles).next_multiple_of(self.width);
        let col_tiles = n.div_ceil(cols);
        for_pieces(row_tiles * col_tiles, 1, rows * cols * k / 16, parallel, |index, _| {
            let (i, j) = (index / col_tiles * rows, index % col_tiles * cols);
            with_scratch(Room::Inner, rows * KC.min(k) + pack::SLACK, |a| {
                let tile = Tile { chunk: self, rows: (i, m.min(i + rows)), cols: (j, n.min(j + cols)), a };
                // SAFETY: tiles are disjoint; the level is one that level() returned.
                unsafe { E::dispatch_at(level, tile) };
            });
        });
    }
}

/// Packs B's columns `from..to` of a chunk, whole slivers.
struct PackB<E> {
    chunk: Chunk<E>,
    from: usize,
    to: usize,
}

impl<E: Real> Kernel<E> for PackB<E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(self) {
        #[inline(always)]
        unsafe fn pack<E: Real, L: Lanes<Elem = E>, const H: usize, const V: usize>(work: PackB<E>) {
            let PackB { chunk: Chunk { product, b_cols, b, .. }, from, to } = work;
            for p in (0..product.k).step_by(KC) {
                let depth = KC.min(product.k - p);
                // SAFETY: rows from `p` and columns from `from` are inside B; the slivers are inside the packed block.
                unsafe {
                    let src = (product.b.add(p * product.b_rs + from * product.b_cs), product.b_rs, product.b_cs);
                    pack::slivers::<E, L>(b.add(p * b_cols + from * depth), V * L::N, src, depth, to - from);
                }
            }
        }
        // SAFETY: a Product's extents are checked.
        unsafe { with_tile!(L, pack(self)) }
    }
}

/// Rows and columns (from, to) of a chunk's C, cut at register tiles, and room for KC terms of the rows.
struct Tile<E> {
    chunk: Chunk<E>,
    rows: (usize, usize),
    cols: (usize, usize),
    a: *mut E,
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
/// The slivers of B are packed with `V` vectors.
#[inline(always)]
unsafe fn compute<E: Real, L: Lanes<Elem = E>, const H: usize, const V: usize>(work: Tile<E>) {
    let Tile { chunk: Chunk { product, b_cols, b, .. }, rows, cols, a } = work;
    let Product { a_rs, a_cs, c, c_rs, c_cs, alpha, .. } = product;
    let width = V * L::N;
    let mut offsets = [0; H];
    for (i, offset) in offsets.iter_mut().enumerate() {
        *offset = i;
    }
    for p in (0..product.k).step_by(KC) {
        let depth = KC.min(product.k - p);
        let beta = if p == 0 { product.beta } else { E::ONE };
        // SAFETY: the tile's rows and `depth` columns from p on are inside A; the room holds their panels.
        unsafe {
            let src = (product.a.add(rows.0 * a_rs + p * a_cs), a_cs, a_rs);
            pack::slivers::<E, L>(a, H, src, depth, rows.1 - rows.0);
        }
        for j in (cols.0..cols.1).step_by(width) {
            for i in (rows.0..rows.1).step_by(H) {
                // SAFETY: panels and slivers are padded to H rows and `width` columns; C is written inside its extents.
                unsafe {
                    let a = a.add((i - rows.0) * depth).cast_const();
                    let b = b.add(p * b_cols + j * depth).cast_const();
                    let (rows, cols) = (H.min(rows.1 - i), width.min(cols.1 - j));
                    let target = Target { c: c.add(i * c_rs + j * c_cs), c_rs, c_cs, rows, cols, alpha, beta };
                    tile::<E, L, H, V, false>(depth, (a, offsets, H), (b, width), target);
                }
            }
        }
    }
}
