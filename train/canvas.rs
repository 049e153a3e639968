//! What pictures are drawn on: the text of an SVG file, or the pixels of a PNG file. Either shows the same, place by place.
//!
//! Pictures are laid out in whole units of an SVG file. For a PNG every unit is [`SCALE`] pixels, for screens and print that
//! show as many, and each of them the mean of [`SAMPLES`]² that are drawn: lines of any slope get smooth edges. Text stays text
//! in an SVG; in a PNG it is drawn in DejaVu Sans, which the program carries so that no font need be installed.

use std::error::Error as StdError;
use std::io;
use std::sync::OnceLock;

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::{FontStyle, TextStyle, register_font};
use plotters_backend::{
    BackendColor, BackendCoord, BackendStyle, BackendTextStyle, DrawingBackend, DrawingErrorKind as Kind,
};

use crate::looks::FONT;
use crate::{Error, Result};

/// Pixels of a PNG in a unit.
const SCALE: u32 = 2;
/// Drawn for each of them, in a row.
const SAMPLES: u32 = 2;
const TIMES: i32 = (SCALE * SAMPLES) as i32;

pub(crate) type Drawn<T> = std::result::Result<T, Box<dyn StdError>>;
pub(crate) type Area<'a> = DrawingArea<Canvas<'a>, Shift>;

/// Text or pixels.
pub(crate) enum Canvas<'a> {
    Svg(SVGBackend<'a>),
    Pixels(BitMapBackend<'a>),
}

/// The text of an SVG file of `size` units.
///
/// # Errors
/// When `draw` fails.
pub(crate) fn svg(size: (u32, u32), draw: impl FnOnce(&Area) -> Drawn<()>) -> Result<String> {
    let mut out = String::new();
    paint(Canvas::Svg(SVGBackend::with_string(&mut out, size)), draw)?;
    Ok(out)
}

/// The bytes of a PNG file of `size` units.
///
/// # Errors
/// When `draw` fails.
pub(crate) fn png(size: (u32, u32), draw: impl FnOnce(&Area) -> Drawn<()>) -> Result<Vec<u8>> {
    let large = (size.0 * TIMES as u32, size.1 * TIMES as u32);
    let mut samples = vec![0; (large.0 * large.1 * 3) as usize];
    paint(Canvas::Pixels(BitMapBackend::with_buffer(&mut samples, large)), draw)?;
    let size = (size.0 * SCALE, size.1 * SCALE);
    let mut out = vec![];
    let encoded = encode(&mut out, size, &means(&samples, size));
    encoded.map_err(|e| Error::new(format!("cannot write the picture as PNG: {e}")))?;
    Ok(out)
}

fn paint(canvas: Canvas<'_>, draw: impl FnOnce(&Area) -> Drawn<()>) -> Result<()> {
    static FONTS: OnceLock<bool> = OnceLock::new();
    // The library measures text with it, for an SVG, too.
    if !FONTS.get_or_init(|| register_font(FONT, FontStyle::Normal, dejavu::sans::regular()).is_ok()) {
        return Err(Error::new("the font of pictures cannot be read"));
    }
    let root = canvas.into_drawing_area();
    let drawn = draw(&root).and_then(|()| Ok(root.present()?));
    drawn.map_err(|e| Error::new(format!("cannot draw the picture: {e}")))
}

/// The mean of the samples of every pixel.
fn means(samples: &[u8], (width, height): (u32, u32)) -> Vec<u8> {
    let (n, width) = (SAMPLES as usize, width as usize);
    let row = width * n * 3;
    let mut out = Vec::with_capacity(width * height as usize * 3);
    for y in 0..height as usize {
        for x in 0..width {
            for channel in 0..3 {
                let at = |i: usize| samples[(y * n + i / n) * row + (x * n + i % n) * 3 + channel];
                let sum: usize = (0..n * n).map(|i| usize::from(at(i))).sum();
                out.push(((sum + n * n / 2) / (n * n)) as u8);
            }
        }
    }
    out
}

fn encode(out: &mut Vec<u8>, size: (u32, u32), pixels: &[u8]) -> std::result::Result<(), png::EncodingError> {
    let mut encoder = png::Encoder::new(out, size.0, size.1);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    let mut writer = encoder.write_header()?;
    writer.write_image_data(pixels)?;
    writer.finish()
}

/// A style whose lines are as wide as their surroundings are large.
struct Large(BackendColor, u32);

impl BackendStyle for Large {
    fn color(&self) -> BackendColor {
        self.0
    }
    fn stroke_width(&self) -> u32 {
        self.1
    }
}

fn large(style: &impl BackendStyle) -> Large {
    Large(style.color(), style.stroke_width() * TIMES as u32)
}

fn at((x, y): BackendCoord) -> BackendCoord {
    (x * TIMES, y * TIMES)
}

type Outcome = std::result::Result<(), Kind<io::Error>>;

/// The error of pixels as one of files.
fn outcome<E: StdError + Send + Sync>(found: std::result::Result<(), Kind<E>>) -> Outcome {
    found.map_err(|e| match e {
        Kind::DrawingError(e) => Kind::DrawingError(io::Error::other(e.to_string())),
        Kind::FontError(e) => Kind::FontError(e),
    })
}

impl DrawingBackend for Canvas<'_> {
    type ErrorType = io::Error;

    fn get_size(&self) -> (u32, u32) {
        match self {
            Canvas::Svg(svg) => svg.get_size(),
            Canvas::Pixels(pixels) => {
                let (width, height) = pixels.get_size();
                (width / TIMES as u32, height / TIMES as u32)
            }
        }
    }

    fn ensure_prepared(&mut self) -> Outcome {
        match self {
            Canvas::Svg(svg) => svg.ensure_prepared(),
            Canvas::Pixels(pixels) => outcome(pixels.ensure_prepared()),
        }
    }

    fn present(&mut self) -> Outcome {
        match self {
            Canvas::Svg(svg) => svg.present(),
            Canvas::Pixels(pixels) => outcome(pixels.present()),
        }
    }

    fn draw_pixel(&mut self, point: BackendCoord, color: BackendColor) -> Outcome {
        match self {
            Canvas::Svg(svg) => svg.draw_pixel(point, color),
            Canvas::Pixels(pixels) => {
                let (from, (x, y)) = (at(point), at(point));
                let style = Large(color, 0);
                outcome(pixels.draw_rect(from, (x + TIMES - 1, y + TIMES - 1), &style, true))
            }
        }
    }

    fn draw_line<S: BackendStyle>(&mut self, from: BackendCoord, to: BackendCoord, style: &S) -> Outcome {
        match self {
            Canvas::Svg(svg) => svg.draw_line(from, to, style),
            Canvas::Pixels(pixels) => outcome(pixels.draw_line(at(from), at(to), &large(style))),
        }
    }

    fn draw_rect<S: BackendStyle>(
        &mut self,
        upper_left: BackendCoord,
        bottom_right: BackendCoord,
        style: &S,
        fill: bool,
    ) -> Outcome {
        match self {
            Canvas::Svg(svg) => svg.draw_rect(upper_left, bottom_right, style, fill),
            Canvas::Pixels(pixels) if fill => {
                outcome(pixels.draw_rect(at(upper_left), at(bottom_right), &large(style), true))
            }
            // The library gives outlines of rectangles no width.
            Canvas::Pixels(pixels) => {
                let ((left, top), (right, bottom)) = (at(upper_left), at(bottom_right));
                let corners = [(left, top), (right, top), (right, bottom), (left, bottom), (left, top)];
                outcome(pixels.draw_path(corners, &large(style)))
            }
        }
    }

    fn draw_path<S: BackendStyle, I: IntoIterator<Item = BackendCoord>>(&mut self, path: I, style: &S) -> Outcome {
        match self {
            Canvas::Svg(svg) => svg.draw_path(path, style),
            Canvas::Pixels(pixels) => outcome(pixels.draw_path(path.into_iter().map(at), &large(style))),
        }
    }

    fn draw_circle<S: BackendStyle>(&mut self, center: BackendCoord, radius: u32, style: &S, fill: bool) -> Outcome {
        match self {
            Canvas::Svg(svg) => svg.draw_circle(center, radius, style, fill),
            Canvas::Pixels(pixels) => {
                outcome(pixels.draw_circle(at(center), radius * TIMES as u32, &large(style), fill))
            }
        }
    }

    fn fill_polygon<S: BackendStyle, I: IntoIterator<Item = BackendCoord>>(&mut self, path: I, style: &S) -> Outcome {
        match self {
            Canvas::Svg(svg) => svg.fill_polygon(path, style),
            Canvas::Pixels(pixels) => outcome(pixels.fill_polygon(path.into_iter().map(at), &large(style))),
        }
    }

    fn draw_text<S: BackendTextStyle>(&mut self, text: &str, style: &S, pos: BackendCoord) -> Outcome {
        match self {
            Canvas::Svg(svg) => svg.draw_text(text, style, pos),
            Canvas::Pixels(pixels) => {
                let BackendColor { rgb: (r, g, b), alpha } = style.color();
                let font = (style.family(), style.size() * f64::from(TIMES), style.style()).into_font();
                let colour = RGBAColor(r, g, b, alpha);
                let large = TextStyle::from(font.transform(style.transform())).color(&colour);
                outcome(pixels.draw_text(text, &large.pos(style.anchor()), at(pos)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The pixels of a picture and its width.
    fn pixels(png: &[u8]) -> (Vec<u8>, usize) {
        let mut reader = png::Decoder::new(io::Cursor::new(png)).read_info().unwrap();
        let mut out = vec![0; reader.output_buffer_size().unwrap()];
        let width = reader.next_frame(&mut out).unwrap().width as usize;
        (out, width)
    }

    #[test]
    fn places_and_sizes_are_those_of_the_svg() {
        let draw = |root: &Area| -> Drawn<()> {
            root.fill(&WHITE)?;
            root.draw(&Circle::new((30, 20), 8, BLACK.filled()))?;
            root.draw(&PathElement::new([(60, 10), (60, 30)], RED.filled().stroke_width(2)))?;
            root.draw(&Text::new("MMMM", (80, 10), (FONT, 20).into_font().color(&BLUE)))?;
            Ok(())
        };
        let text = svg((160, 40), draw).unwrap();
        assert!(text.contains("width=\"160\" height=\"40\"") && text.contains("cx=\"30\" cy=\"20\" r=\"8\""));
        let (found, width) = pixels(&png((160, 40), draw).unwrap());
        assert_eq!((width, found.len()), (320, 320 * 80 * 3));
        let at = |x: usize, y: usize| &found[(y * width + x) * 3..][..3];
        // In pixels: the disc has its centre at (60, 40) and a radius of 16.
        assert_eq!((at(60, 40), at(60, 27), at(60, 20)), (&[0, 0, 0][..], &[0, 0, 0][..], &[255; 3][..]));
        let red = |y: usize| (0..width).filter(|&x| at(x, y)[0] > 200 && at(x, y)[1] < 60).count();
        assert!((3..=5).contains(&red(40)), "a line of two units is four pixels wide: {}", red(40));
        assert_eq!(red(70), 0);
        let blue = |x: usize| (0..80).any(|y| at(x, y)[2] > 150 && at(x, y)[0] < 100);
        let inked = (160..320).filter(|&x| blue(x)).count();
        assert!((40..150).contains(&inked), "text: {inked} columns");
        // Edges are neither one nor the other.
        assert!(found.chunks(3).any(|p| p[0] == p[1] && p[1] == p[2] && (60..200).contains(&p[0])));
    }
}
