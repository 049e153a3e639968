//! What lines of pictures look like: many that can be told apart.
//!
//! Colours are those of Okabe and Ito, told apart by all kinds of colour vision. When they are used up they come again with
//! other dashes and hollow dots, three times over.

use plotters::element::DashedPathElement;
use plotters::prelude::*;

pub(crate) const FONT: &str = "sans-serif";
/// Of text, and of what is no model: points that were observed.
pub(crate) const INK: RGBColor = RGBColor(40, 40, 48);
const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(230, 159, 0),
    RGBColor(0, 0, 0),
];
/// Lengths of a dash and of the gap after it.
const DASHES: [(i32, i32); 3] = [(i32::MAX, 1), (9, 5), (2, 4)];

/// How a line and its dots are drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Look {
    pub colour: RGBColor,
    /// Which of [`DASHES`].
    dashes: usize,
}

impl Look {
    /// Of the line `n` of a picture. The 22nd looks as the first.
    pub fn of(n: usize) -> Look {
        Look { colour: COLOURS[n % COLOURS.len()], dashes: n / COLOURS.len() % DASHES.len() }
    }

    /// Dark, of no line that [`Look::of`] gives dots to.
    pub fn ink() -> Look {
        Look { colour: INK, dashes: 0 }
    }

    /// The points joined.
    pub fn line<C>(self, points: Vec<C>) -> DashedPathElement<std::vec::IntoIter<C>, i32>
    where
        C: Clone,
    {
        let (dash, gap) = DASHES[self.dashes];
        DashedPathElement::new(points, dash, gap, self.colour.stroke_width(2))
    }

    /// A dot: discs to be drawn on one another, as radius and colour.
    pub fn dot(self, radius: i32) -> Vec<(i32, RGBColor)> {
        let hollow = [None, Some(2), Some(1)][self.dashes].map(|rim| (radius - rim, WHITE));
        [(radius, self.colour)].into_iter().chain(hollow).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sixteen_lines_look_different() {
        let looks: Vec<Look> = (0..21).map(Look::of).collect();
        for (n, look) in looks.iter().enumerate() {
            assert!(!looks[..n].contains(look) && *look != Look::ink(), "{n}");
        }
        let dots: Vec<_> = looks.iter().map(|look| look.dot(4)).collect();
        assert!((0..21).all(|n| !dots[..n].contains(&dots[n])));
    }
}
