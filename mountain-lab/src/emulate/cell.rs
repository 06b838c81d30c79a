// SPDX-License-Identifier: GPL-2.0-or-later
//! What the emulators' rattan cells have in common: packets arrive through a channel, and all that
//! is particular to a cell is what takes them out again.

use std::sync::Arc;

use anyhow::{anyhow, Result};
use rattan_core::cells::{Cell, ControlInterface, Egress, Ingress, StdPacket};
use rattan_core::error::Error as RattanError;
use rattan_core::metal::timer::Timer;
use tokio::sync::mpsc::{unbounded_channel, UnboundedReceiver, UnboundedSender};

/// A cell whose behaviour is its egress.
pub struct EgressCell<E> {
    ingress: Arc<Queue>,
    egress: E,
}

pub struct Queue(UnboundedSender<StdPacket>);

impl<E> EgressCell<E> {
    /// `egress` makes the egress that takes the packets out of the channel, and has a timer.
    pub fn new(egress: impl FnOnce(UnboundedReceiver<StdPacket>, Timer) -> E) -> Result<Self> {
        let (sender, packets) = unbounded_channel();
        let timer = Timer::new().map_err(|e| anyhow!("{e:?}"))?;
        Ok(EgressCell {
            ingress: Arc::new(Queue(sender)),
            egress: egress(packets, timer),
        })
    }
}

impl<E: Egress<StdPacket> + 'static> Cell<StdPacket> for EgressCell<E> {
    type IngressType = Queue;
    type EgressType = E;
    type ControlInterfaceType = NoControl;

    fn sender(&self) -> Arc<Queue> {
        self.ingress.clone()
    }

    fn receiver(&mut self) -> &mut E {
        &mut self.egress
    }

    fn into_receiver(self) -> E {
        self.egress
    }

    fn control_interface(&self) -> Arc<NoControl> {
        Arc::new(NoControl)
    }
}

impl Ingress<StdPacket> for Queue {
    fn enqueue(&self, packet: StdPacket) -> Result<(), RattanError> {
        self.0
            .send(packet)
            .map_err(|_| RattanError::ChannelError("the cell is gone".into()))
    }
}

/// The cells are controlled by what they share with their makers, not through rattan.
pub struct NoControl;

impl ControlInterface for NoControl {
    type Config = ();

    fn set_config(&self, _config: ()) -> Result<(), RattanError> {
        Ok(())
    }
}
